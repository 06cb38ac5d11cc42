"""Reports of sparse and batch training: tables of runs and of bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import rich.table
import scipy.sparse as sp

from experiments.convex import batch, lock_free
from meshpar.commands.reports import terminal
from meshpar.methods.dbpg.training import Pass, Result


def hogwild_table(rows: Sequence[lock_free.Row]) -> rich.table.Table:
    """Objective, lost updates and speed of every number of processes."""
    columns = ("rows", "processes", "objective", "over one", "updates lost", "rows/s")
    table = rich.table.Table(*columns)
    for row in rows:
        table.add_row(
            row.data,
            str(row.processes),
            f"{row.objective:,.2f}",
            f"{100 * row.excess:+.3f}%",
            f"{100 * row.lost:.3f}%",
            f"{row.rows_per_second:,.0f}",
        )
    return table


def pass_line(done: Pass) -> str:
    """One line per pass."""
    return (
        f"pass {done.number}: objective {done.objective:,.3f}, {done.nonzeros:,} "
        f"weights, {100 * done.pushed:.1f}% of the keys pushed, "
        f"{done.sent / 1e6:,.2f} MB sent"
    )


def bytes_table(result: Result) -> rich.table.Table:
    """The bytes that every filter saved, and what was sent."""
    table = rich.table.Table("filter", "of", "MB", "share")
    whole = result.sent + sum(row.saved for row in result.filters)

    def add(name: str, direction: str, num_bytes: int) -> None:
        share = 100 * num_bytes / max(whole, 1)
        table.add_row(name, direction, f"{num_bytes / 1e6:,.3f}", f"{share:.1f}%")

    for row in result.filters:
        add(f"saved by {row.name}", row.direction, row.saved)
    add("sent", "both", result.sent)
    add("without filters", "both", whole)
    return table


def print_dbpg(
    name: str, rows: sp.csr_array, result: Result, found: Mapping[str, Any]
) -> None:
    """Prints the outcome of a training by DBPG.

    Args:
      name: of the data.
      rows: that were trained on.
      result: of the training.
      found: objective, held-out accuracy and, if asked for, the reference.
    """
    console = terminal.plain_console()
    console.print(bytes_table(result))
    seen = len(set(rows.indices.tolist()))
    console.print(f"{name} {rows.shape[0]:,} of them trained on, {seen:,} features")
    if found["held_out_accuracy"] is not None:
        console.print(f"held-out accuracy {100 * found['held_out_accuracy']:.2f}%")
    console.print(f"objective {found['objective']:,.4f}")
    if "reference" in found:
        excess = found["objective"] / found["reference"] - 1
        console.print(
            f"{found['solver']} {found['reference']:,.4f}: {excess:+.2e} relative to it"
        )


def costs_table(costs: Mapping[str, float], slowdown: float) -> rich.table.Table:
    """The cost of one straggler under every schedule."""
    table = rich.table.Table("schedule", f"time with one worker {slowdown:g}x slower")
    for name, cost in costs.items():
        table.add_row(name, f"{cost:.3f}x")
    return table


def descents_table(descents: Sequence[batch.Descent]) -> rich.table.Table:
    """Time and objective of every way to treat stragglers."""
    columns = ("stragglers are", "parts per worker", "simulated s", "objective")
    table = rich.table.Table(*columns, "largest difference of a weight")
    names = {
        batch.NAIVE: "waited for",
        batch.IGNORE: "ignored",
        batch.CYCLIC: "coded, cyclic",
        batch.REPETITION: "coded, repetition",
    }
    for row in descents:
        difference = float(np.abs(row.weights - descents[0].weights).max())
        table.add_row(
            names[row.method],
            str(row.work),
            f"{row.seconds:,.0f}",
            f"{row.objective:,.4f}",
            f"{difference:.1e}",
        )
    return table
