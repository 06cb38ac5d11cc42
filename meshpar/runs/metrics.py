"""Metrics of a run: metrics.jsonl, TensorBoard files and a plot of the loss."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshpar.errors import CheckpointError
from meshpar.metrics import WEIGHT
from meshpar.runs import json_lines

_EVALUATION = "evaluation_"
EVALUATION_LOSS = f"{_EVALUATION}loss"
"""Name of the held-out loss in rows."""
DRIFT = "drift"
"""Name of the distance of replicas that train apart, of evaluations alone."""


METRICS = "metrics.jsonl"
"""Name of the file of rows."""
RESUMED = "resumed"
"""Key of the rows that mark where a run went on; they supersede rows of later steps."""


class MetricsLog:
    """Metrics by step, in files that a resumed run appends to.

    Attributes:
      path: the metrics.jsonl.
      tensorboard: folder of the TensorBoard files.
    """

    def __init__(self, folder: pathlib.Path, step: int, changes: Sequence[str] = ()):
        """Opens the files, and marks rows after the restored `step` as superseded.

        Args:
          folder: the run's folder.
          step: number of steps done before.
          changes: settings that change the course of training from there.

        Raises:
          CheckpointError: something else is in the place of a file.
        """
        from meshpar.runs.tensorboard import TensorBoard

        self.path, self.tensorboard = folder / METRICS, folder / "tensorboard"
        try:
            had_rows = bool(read(self.path))
            self._copy = TensorBoard(self.tensorboard, step if had_rows else None)
            self._file = json_lines.open_to_add(self.path)
        except OSError as error:
            raise CheckpointError(
                f"the metrics of the run cannot be written: {error}; move that file "
                "away, or choose another --workdir"
            ) from error
        if had_rows or changes:
            resumed = {"step": step, RESUMED: True, "changes": list(changes)}
            json_lines.add(self._file, resumed)
        if changes:
            self._copy.add_text(step, "changes", "\n\n".join(changes))

    def write(self, step: int, **values: Any) -> None:
        """Writes one row of numbers, and of lists, which TensorBoard leaves out."""
        json_lines.add(self._file, {"step": step, **values})
        numbers = {k: x for k, x in values.items() if not isinstance(x, list)}
        self._copy.add_scalars(step, numbers)

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
        self._copy.close()


def of_evaluation(found: Mapping[str, Any]) -> dict[str, Any]:
    """{name in rows: number or list} of the metrics of an evaluation, without weights.

    Args:
      found: {name: number or array}.
    """
    return {
        name if name == DRIFT else f"{_EVALUATION}{name}": np.asarray(x).tolist()
        for name, x in found.items()
        if name.rpartition("/")[2] != WEIGHT
    }


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl, as they stand after all resumptions.

    The file keeps every row. Where a run went on from a checkpoint, rows of later steps
    are left out here; of several rows of one step with the same metrics the last
    counts.
    """
    rows: dict[tuple[int, frozenset[str]], dict[str, Any]] = {}
    for row in json_lines.read(path):
        if not isinstance(row.get("step"), int):
            continue
        if RESUMED in row:
            rows = {key: old for key, old in rows.items() if key[0] <= row["step"]}
        else:
            rows[row["step"], frozenset(row)] = row
    return list(rows.values())


def plot(
    rows: list[dict[str, Any]],
    path: pathlib.Path,
    baseline: tuple[str, float] | None,
) -> None:
    """Draws training and held-out loss over the steps, with a loss to beat.

    A process that shows figures of its own, such as a notebook, keeps its backend.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="tight")
    axes = figure.subplots()
    for name, style in (("loss", "-"), (EVALUATION_LOSS, "o-")):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name.replace("_", " "))
    if baseline:
        name, loss = baseline
        axes.axhline(loss, color="grey", linestyle="--", label=name)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(path, dpi=120)
