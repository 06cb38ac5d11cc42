"""Verification reports: the errors of all tensors, as a table or as JSON."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import rich.table
from rich.text import Text

from meshpar.commands.reports import terminal
from meshpar.explain.random_layouts import EQUAL, REFUSED, WRONG, Outcome
from meshpar.explain.verify import Comparison, VerifyReport
from meshpar.layouts.layout import Layout


def _table(report: VerifyReport) -> rich.table.Table:
    """The largest error of every tensor over all steps."""
    worst: dict[tuple[str, str], Comparison] = {}
    for comparison in report.comparisons:
        key = (comparison.kind, comparison.tensor)
        # Not "error > worst": a NaN must replace the worst error.
        if key not in worst or not comparison.error <= worst[key].error:
            worst[key] = comparison
    tensor = rich.table.Column("tensor", overflow="fold")
    table = rich.table.Table("kind", tensor, "relative error", "step", "equal")
    for (kind, name), comparison in worst.items():
        verdict = "yes" if comparison.ok else Text("NO", "bold red")
        table.add_row(
            kind, name, f"{comparison.error:.1e}", str(comparison.step), verdict
        )
    return table


def as_dict(report: VerifyReport, layout: Layout) -> dict[str, Any]:
    """The report for programs, as JSON values."""
    first = report.first_difference
    return {
        "layout": str(layout),
        "equal": report.ok,
        "judge": report.judge,
        "violations": report.violations,
        "shares": report.shares and dataclasses.asdict(report.shares),
        "first_difference": first and dataclasses.asdict(first),
        "comparisons": [dataclasses.asdict(c) for c in report.comparisons],
    }


def print_report(
    report: VerifyReport, layout: Layout, num_steps: int, num_collectives: int
) -> None:
    """Prints the table and a verdict.

    Args:
      report: the comparison with one device.
      layout: the layout that was compared.
      num_steps: number of steps that were compared.
      num_collectives: number of collectives in the compiled step.
    """
    console = terminal.plain_console()
    console.print(_table(report))
    for violation in report.violations:
        console.print(f"CONTRACT BROKEN: {violation}", soft_wrap=True)
    if report.ok:
        console.print(
            f"EQUAL: {layout} trains the same model as {report.judge} "
            f"({num_steps} steps, {len(report.comparisons)} comparisons) and "
            f"keeps its contract ({num_collectives} collectives, "
            f"{report.shares.exactly} of their bytes declared exactly)",
            soft_wrap=True,
        )
    elif report.first_difference is not None:
        console.print(f"DIFFERENT: {report.problem}", soft_wrap=True)


def print_outcomes(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Prints one line per layout as it comes, then the counts, which it returns."""
    counts = dict.fromkeys((EQUAL, REFUSED, WRONG), 0)
    for outcome in outcomes:
        print(outcome, flush=True)
        counts[outcome.verdict] += 1
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.items()))
    return counts
