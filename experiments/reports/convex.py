"""Reports of sparse and batch training: tables of runs."""

from collections.abc import Sequence

import rich.table

from experiments.convex import lock_free


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
