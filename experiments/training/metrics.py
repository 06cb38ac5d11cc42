"""Metrics of a run: metrics.jsonl, TensorBoard files and a plot of the loss."""

import json
import os
import pathlib
from typing import Any

import tensorboardX

EVALUATION_LOSS = "evaluation_loss"
"""Name of the held-out loss in rows."""


class MetricsLog:
    """Metrics by step, in files that a resumed run appends to.

    Attributes:
      path: the metrics.jsonl.
      tensorboard: folder of the TensorBoard files.
    """

    def __init__(self, folder: pathlib.Path, step: int):
        """Opens the files, and drops rows after the restored `step`."""
        self.path = folder / "metrics.jsonl"
        rows = [row for row in read(self.path) if row["step"] <= step]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.replace(partial, self.path)
        self._file = self.path.open("a", buffering=1)
        self.tensorboard = folder / "tensorboard"
        purge = step + 1 if rows else None
        self._writer = tensorboardX.SummaryWriter(
            str(self.tensorboard), purge_step=purge
        )

    def write(self, step: int, **values: float) -> None:
        """Writes one row."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def has_evaluation(self, step: int) -> bool:
        """Whether the log holds the held-out loss of a step."""
        return any(
            row["step"] == step and EVALUATION_LOSS in row for row in read(self.path)
        )

    def sync(self) -> None:
        """Waits until all rows are on the disk, so that no checkpoint is ahead."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flushes and closes all files."""
        self._file.close()
        self._writer.close()


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl, without a line that a killed process left incomplete."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def plot(rows: list[dict[str, Any]], path: pathlib.Path, floor: float) -> None:
    """Draws training and held-out loss over the steps, with the unigram floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, style in (("loss", "-"), (EVALUATION_LOSS, "o-")):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name.replace("_", " "))
    axes.axhline(floor, color="grey", linestyle="--", label="unigram model")
    axes.set(xlabel="step", ylabel="nats per token")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
