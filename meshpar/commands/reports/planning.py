"""Plans as tables, as a picture of time over memory, and as JSON."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib.axis
import matplotlib.figure
import matplotlib.ticker
import rich.table

from meshpar.commands.reports import pictures, terminal
from meshpar.explain.report import Explanation
from meshpar.planner.candidate import Candidate
from meshpar.planner.plans import Plans
from meshpar.planner.uncertainty import ErrorRange
from meshpar.units import readable_bytes, readable_seconds


def _candidates(
    title: str, plans: Plans, candidates: Sequence[Candidate]
) -> rich.table.Table:
    layout = rich.table.Column("layout", overflow="fold", ratio=4)
    goes = rich.table.Column("its time goes to", overflow="fold", ratio=3)
    why = rich.table.Column("against the best", overflow="fold", ratio=3)
    columns = layout, "step", "memory", "sent", goes, why
    table = rich.table.Table(*columns, title=title)
    for c in candidates:
        table.add_row(*candidate_row(plans, c))
    return table


def candidate_row(plans: Plans, candidate: Candidate) -> tuple[str, ...]:
    """A row: layout, time, memory, bytes sent, largest terms, why not the best."""
    known, seconds = candidate.uncertainty, candidate.seconds.total
    return (
        str(candidate.layout),
        _with_range(readable_seconds(seconds), known and known.seconds),
        _with_range(readable_bytes(candidate.memory.total), known and known.memory),
        readable_bytes(candidate.wire_bytes),
        _largest_terms(candidate),
        plans.why_not(candidate),
    )


def _with_range(predicted: str, found: ErrorRange | None) -> str:
    """A prediction, and how far compiled programs were from such, where it is known."""
    return f"{predicted}\n{found}" if found else predicted


def _largest_terms(candidate: Candidate) -> str:
    """The terms that take most of a step."""
    seconds = candidate.seconds
    terms = sorted(seconds.by_term.items(), key=lambda term: -term[1])
    shares = ((name, value / seconds.total) for name, value in terms[:_MOST_TERMS])
    return ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.01)


_MOST_TERMS = 4


COMPILED = "layout", "memory", "compiled", "error", "step", "estimated", "verdict"
"""Columns of `compiled_rows`."""


def compiled_rows(
    plans: Plans, compiled: Sequence[Explanation]
) -> list[tuple[str, ...]]:
    """Rows of predictions and compiled figures, by layout."""
    rows = []
    for candidate, explanation in zip(plans.best, compiled, strict=False):
        memory, peak = candidate.memory.total, explanation.compiled_bytes["peak"]
        time = explanation.time
        rows.append(
            (
                explanation.layout,
                readable_bytes(memory),
                readable_bytes(peak),
                f"{memory / peak - 1:+.1%}",
                readable_seconds(candidate.seconds.total),
                readable_seconds(time.seconds) if time else "-",
                "; ".join(faults(plans, explanation)) or "fits, contract kept",
            )
        )
    return rows


def faults(plans: Plans, explanation: Explanation) -> list[str]:
    """Faults of a compiled layout: its contract is broken, or memory is too small."""
    peak, budget = explanation.compiled_bytes["peak"], plans.machine.memory_bytes
    lines = list(explanation.violations)
    if peak > budget:
        lines.append(
            f"needs {readable_bytes(peak)} of {readable_bytes(budget)} a device"
        )
    return lines


def summary(plans: Plans) -> str:
    """The machine, and how many layouts fit, do not fit and are refused."""
    machine, number = plans.machine, len(plans.best) + len(plans.others)
    return (
        f"{len(machine.devices)} x {machine.chip.name}, "
        f"{readable_bytes(machine.memory_bytes)} each: {number} layouts fit, "
        f"{len(plans.too_large)} need more memory, {sum(plans.refused.values())} are "
        f"refused; {plans.method}"
        + f"; times are {machine.slowdown:.2f} times those predicted, as measured"
        * (machine.slowdown != 1)
    )


def print_plans(plans: Plans, compiled: Sequence[Explanation], top: int) -> None:
    """Prints the best layouts, the Pareto front, refusals and compiled figures.

    Args:
      plans: the plans.
      compiled: the first of `plans.best`, compiled.
      top: layouts to list.
    """
    console = terminal.wide_console()
    console.print(summary(plans), soft_wrap=True)
    console.print(_candidates("predicted to be fastest", plans, plans.best[:top]))
    front = [c for c in plans.pareto if c not in plans.best]
    if front:
        title = "less time or less memory than all others"
        console.print(_candidates(title, plans, front[: 2 * top]))
    for reason, count in sorted(plans.refused.items(), key=lambda item: -item[1]):
        console.print(f"{count} refused: {reason}", soft_wrap=True)
    if compiled:
        table = rich.table.Table(*COMPILED, title="predicted and compiled")
        for row in compiled_rows(plans, compiled):
            table.add_row(*row)
        console.print(table)


def _label_ticks(axis: matplotlib.axis.Axis, readable: Callable[[float], str]) -> None:
    """Labels a few round numbers of a logarithmic axis with their units."""
    low, high = axis.get_view_interval()
    mantissas = (1.0,) if high > 100 * low else (1.0, 2.0, 5.0)
    if high > 4 * low:
        ticks = matplotlib.ticker.LogLocator(subs=mantissas, numticks=8)
    else:
        ticks = matplotlib.ticker.MaxNLocator(5)
    axis.set_major_locator(ticks)
    axis.set_minor_locator(matplotlib.ticker.NullLocator())
    axis.set_major_formatter(lambda value, _: readable(value))


@pictures.with_look
def pareto_figure(plans: Plans) -> matplotlib.figure.Figure:
    """Time over memory of all layouts, with the Pareto front."""
    figure = matplotlib.figure.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    groups = (
        ("need more memory", plans.too_large, "0.6"),
        ("fit", plans.fitting, "C0"),
    )
    for name, candidates, color in groups:
        memory = [c.memory.total for c in candidates]
        seconds = [c.seconds.total for c in candidates]
        axes.scatter(memory, seconds, s=6, color=color, label=name)
    front = sorted(plans.pareto, key=lambda c: c.memory.total)
    memory = [c.memory.total for c in front]
    axes.plot(memory, [c.seconds.total for c in front], "C3-o", ms=4, label="front")
    budget = plans.machine.memory_bytes
    axes.axvline(budget, color="0.5", ls="--", lw=1, label="memory of a device")
    axes.set(xscale="log", yscale="log")
    axes.set(xlabel="predicted memory of a device", ylabel="predicted step")
    _label_ticks(axes.xaxis, readable_bytes)
    _label_ticks(axes.yaxis, readable_seconds)
    axes.legend()
    return figure


def as_dict(plans: Plans, compiled: Sequence[Explanation]) -> dict[str, Any]:
    """The plans as plain values, for JSON."""

    def plain(c: Candidate) -> dict[str, Any]:
        memory = dataclasses.asdict(c.memory) | {"total": c.memory.total}
        seconds = c.seconds.by_term | {"total": c.seconds.total}
        known = c.uncertainty and dataclasses.asdict(c.uncertainty)
        return {
            "layout": str(c.layout),
            "memory": memory,
            "seconds": seconds,
            "wire_bytes": c.wire_bytes,
            "found_over_predicted": known,
            "why_not": plans.why_not(c),
        }

    return {
        "chip": plans.machine.chip.name,
        "devices": len(plans.machine.devices),
        "memory_bytes": plans.machine.memory_bytes,
        "slowdown": plans.machine.slowdown,
        "method": plans.method,
        "fitting": len(plans.best) + len(plans.others),
        "too_large": len(plans.too_large),
        "refused": plans.refused,
        "best": [plain(c) for c in plans.best],
        "pareto": [plain(c) for c in plans.pareto],
        "compiled": [e.as_dict() for e in compiled],
    }
