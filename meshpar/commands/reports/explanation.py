"""Explanations of layouts as text: pipeline, parameters, collectives and memory."""

import dataclasses
from collections.abc import Sequence

import rich.console
import rich.table
from rich.text import Text

from meshpar.commands.reports import terminal
from meshpar.explain.report import Explanation
from meshpar.pipeline.report import PipelineReport
from meshpar.units import readable_bytes, readable_seconds


def _parameters(explanation: Explanation) -> rich.table.Table:
    columns = ("variable", "kind", "shape", "spec", "per device", "reason")
    table = rich.table.Table(*columns)
    for leaf in explanation.parameters:
        spec = ", ".join("*".join(axes) or "-" for axes in leaf.spec)
        shape = "x".join(map(str, leaf.shape))
        size = readable_bytes(leaf.bytes_per_device)
        table.add_row(leaf.path, leaf.kind, shape, f"[{spec}]", size, leaf.reason)
    return table


def _title(explanation: Explanation) -> str:
    name, layout = explanation.name, explanation.layout
    return f"{name} under {layout}" if name else layout


def _run(explanation: Explanation) -> str:
    return "run" if explanation.name else "step"


def _memory(explanations: Sequence[Explanation]) -> rich.table.Table:
    table = rich.table.Table("bytes per device", *map(_title, explanations))

    def add(title: str, sizes: Sequence[float]) -> None:
        table.add_row(title, *map(readable_bytes, sizes))

    predicted = [e.predicted and dataclasses.asdict(e.predicted) for e in explanations]
    if all(predicted):
        for kind in predicted[0]:
            add(f"predicted {kind}", [sizes[kind] for sizes in predicted])
        add("predicted total", [e.predicted.total for e in explanations])
    add("state, exact", [e.state_bytes for e in explanations])
    for kind in ("arguments", "temporary", "peak"):
        add(f"compiled {kind}", [e.compiled_bytes[kind] for e in explanations])
    return table


def _collectives(explanation: Explanation) -> rich.table.Table:
    why = rich.table.Column("why", overflow="fold")
    columns = ("collective", "axes", "declared", "found", "exposed", "runs", why)
    table = rich.table.Table(*columns, title=f"sent per device and {_run(explanation)}")
    for row in explanation.traffic:
        table.add_row(
            row.kind,
            "*".join(row.axes),
            ("at most " if row.bounded else "") + readable_bytes(row.declared_bytes),
            readable_bytes(row.found_bytes),
            readable_bytes(row.exposed_bytes),
            str(row.executions),
            "; ".join(row.why),
        )
    return table


def _host_transfers(explanation: Explanation) -> rich.table.Table:
    columns = ("host memory", "to the device", "to the host")
    table = rich.table.Table(
        *columns, title=f"moved per device and {_run(explanation)}"
    )
    rows = [("declared: " + t.why, t) for t in explanation.host]
    if explanation.host_found is not None:
        rows.append(("found", explanation.host_found))
    for why, transfer in rows:
        sizes = transfer.to_device, transfer.to_host
        table.add_row(why, *map(readable_bytes, sizes))
    if (seconds := explanation.host_seconds) is not None:
        table.caption = f"at least {1e3 * seconds:.0f} ms over the link to the host"
    return table


def _time(explanation: Explanation) -> rich.table.Table:
    """The loops and lines that cost most."""
    time = explanation.time
    total = max(time.cycles, 1.0)
    table = rich.table.Table(
        "costs most", "runs", "cycles", "exposed", title=_seconds(explanation)
    )
    for loop in time.loops:
        table.add_row(
            f"loop, most at {_line(loop.source)}",
            str(loop.rounds),
            f"{loop.cycles / total:.1%}",
            readable_seconds(loop.exposed_seconds),
        )
    for source, cycles in time.sources:
        table.add_row(_line(source), "", f"{cycles / total:.1%}", "")
    return table


def _seconds(explanation: Explanation) -> str:
    """The estimate of one run in one line."""
    time = explanation.time
    return (
        f"estimated {_run(explanation)}: {readable_seconds(time.seconds)}, of them "
        f"{readable_seconds(time.exposed_seconds)} exposed transfers "
        f"({time.cycles / 1e9:.3f} Gcycles)"
    )


def _line(source: str) -> str:
    """The last folders of "file:line"."""
    return "/".join(source.split("/")[-3:])


def _formula(value: float, formula: str) -> str:
    return f" (formula {formula} = {value:.4f})"


def _print_pipeline(console: rich.console.Console, pipeline: PipelineReport) -> None:
    """Prints the schedule as text, and what it costs."""
    layers = "/".join(map(str, pipeline.layers))
    console.print(
        f"schedule {pipeline.schedule}: {pipeline.stages} stages, layers {layers}, "
        f"{pipeline.microbatches} microbatches, {pipeline.ticks} ticks",
        soft_wrap=True,
    )
    console.print(pipeline.text, soft_wrap=True)
    formula = "" if pipeline.formula is None else _formula(*pipeline.formula)
    console.print(
        f"bubble {pipeline.bubble:.4f}{formula}; stage inputs "
        f"in flight {'/'.join(map(str, pipeline.in_flight))}; "
        f"{readable_bytes(pipeline.saved_bytes)} saved between forward and backward "
        f"passes; {pipeline.sends} sends per stage and step",
        soft_wrap=True,
    )


def _print_layout(
    console: rich.console.Console, explanation: Explanation, parameters: bool
) -> None:
    """Prints one layout."""
    e = explanation
    sizes = "*".join(f"{axis}={size}" for axis, size in e.mesh.items())
    details = f": lowering {e.lowering}, {sizes} x {e.device_kind}"
    console.print(Text.assemble((_title(e), "bold"), details), soft_wrap=True)
    for note in (e.why_auto, e.mode):
        if note:
            console.print(note, soft_wrap=True)
    if e.pipeline is not None:
        _print_pipeline(console, e.pipeline)
    if parameters:
        console.print(_parameters(e))
    console.print(_collectives(e))
    if e.host:
        console.print(_host_transfers(e))
    if e.time is not None:
        console.print(_time(e))
    for path, reason in e.replicated.items():
        console.print(f"replicated: {path} ({reason})", soft_wrap=True)
    for warning in e.warnings:
        line = Text.assemble(("warning:", "yellow"), f" {warning}")
        console.print(line, soft_wrap=True)
    for violation in e.violations:
        line = Text.assemble(("VIOLATION:", "bold red"), f" {violation}")
        console.print(line, soft_wrap=True)
    console.print(str(e.shares), soft_wrap=True)


def print_explanations(explanations: Sequence[Explanation], parameters: bool) -> None:
    """Prints one or more layouts, and a table that compares their memory.

    Args:
      explanations: one per layout.
      parameters: whether to list every parameter.
    """
    console = terminal.wide_console()
    for explanation in explanations:
        _print_layout(console, explanation, parameters)
    console.print(_memory(explanations))
