"""Results of a local SGD sweep: means over the seeds, as a table and a plot."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import rich.table

from meshpar.runs.modes import SYNCHRONOUS


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per case: means over the seeds, and the spread of the losses."""
    summaries = []
    for case in dict.fromkeys(row["case"] for row in rows):
        runs = [row for row in rows if row["case"] == case]
        losses = [run["loss"] for run in runs]
        summaries.append(
            {
                "case": case,
                "loss": float(np.mean(losses)),
                "spread": float(np.std(losses)),
                "bytes_per_step": float(np.mean([r["bytes_per_step"] for r in runs])),
                "drift": float(np.mean([r.get("drift", 0.0) for r in runs])),
            }
        )
    return summaries


def table(rows: Sequence[dict[str, Any]]) -> rich.table.Table:
    """The summary, with each case's loss relative to synchronous training."""
    summaries = summary(rows)
    reference = next(row["loss"] for row in summaries if row["case"] == SYNCHRONOUS)
    columns = ("case", "held-out loss", "of synchronous", "bytes", "drift")
    result = rich.table.Table(*columns)
    for row in summaries:
        result.add_row(
            row["case"],
            f"{row['loss']:.4f} +- {row['spread']:.4f}",
            f"{100 * (row['loss'] / reference - 1):+.2f}%",
            f"{row['bytes_per_step']:,.0f}",
            f"{row['drift']:.4f}",
        )
    return result


def plot(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws the mean held-out loss over bytes per step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="tight")
    axes = figure.subplots()
    for row in summary(rows):
        num_bytes = max(row["bytes_per_step"], 1.0)
        axes.errorbar(num_bytes, row["loss"], yerr=row["spread"], fmt="o", capsize=3)
        axes.annotate(
            row["case"],
            (num_bytes, row["loss"]),
            fontsize=7,
            rotation=20,
            textcoords="offset points",
            xytext=(4, 4),
        )
    axes.set(
        xscale="log",
        xlabel="bytes sent to other replicas, per device and step",
        ylabel="held-out loss, nats per token",
    )
    figure.savefig(path, dpi=120)
