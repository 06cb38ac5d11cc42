"""Comparison of two runs: metrics of every step, evaluations, state."""

import contextlib
import dataclasses
import math
import pathlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from meshpar.arrays import leaves_by_path
from meshpar.checkpoint import persistent
from meshpar.runs import metrics
from meshpar.runs.step_log import measures_time

METRICS, STATE, LOSS = "metrics", "state", "loss"
"""Promises of a mode of training: every metric and the state are equal bit for bit; the
state and the loss of the end are, where islands on the way are a step apart; or only
the loss of the end is near, where it depends on timing."""

_NEAR = 0.1
"""Largest relative difference of losses that are near, beside their spread."""


@dataclasses.dataclass(frozen=True)
class Results:
    """The results that a run leaves behind.

    Attributes:
      values: {step: {metric: value}}, the held-out loss among them.
      step: that of the newest checkpoint.
      tensors: {path: array} of that checkpoint: parameters, optimizer, all else.
      spread: largest distance between the last held-out losses of equal runs, where
        they depend on timing.
    """

    values: Mapping[int, Mapping[str, float]]
    step: int
    tensors: Mapping[str, np.ndarray]
    spread: float = 0.0

    @property
    def last_loss(self) -> float:
        """The last held-out loss; NaN without one."""
        last = self.values[max(self.values)]
        return last.get(metrics.EVALUATION_LOSS, math.nan)


def read_results(folder: pathlib.Path) -> Results:
    """Reads the results of a finished run.

    Args:
      folder: the run's folder.

    Raises:
      Exception: something of them is missing, or cannot be read.
    """
    values: dict[int, dict[str, float]] = {}
    for row in metrics.read(folder / metrics.METRICS):
        known = values.setdefault(row["step"], {})
        known |= {k: x for k, x in row.items() if not measures_time(k)}
    newest = persistent.find_checkpoints(folder / "checkpoints")[-1]
    tensors = {}
    for item in (persistent.STATE, persistent.EXTRA):
        if (newest.path / item).is_dir():
            tensors |= {f"{item}{p}": x for p, x in _read(newest.path / item).items()}
    return Results(values, newest.step, tensors)


def _read(item: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of one item of a checkpoint, on the host.

    A run does not read the file of their shardings, and a fault may have changed it.
    """
    handler = ocp.PyTreeCheckpointHandler()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(ocp.Checkpointer(handler)) as reader,
    ):
        unread = shutil.ignore_patterns("_sharding")
        item = shutil.copytree(item, pathlib.Path(folder, item.name), ignore=unread)
        tree = reader.metadata(item).item_metadata.tree
        arguments = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree
        )
        whole = ocp.args.PyTreeRestore(item=tree, restore_args=arguments)
        return leaves_by_path(reader.restore(item, args=whole))


def median_of(runs: Sequence[Results]) -> Results:
    """The results of the middle one of equal runs, with the spread of all."""
    ordered = sorted(runs, key=lambda run: run.last_loss)
    spread = ordered[-1].last_loss - ordered[0].last_loss
    return dataclasses.replace(ordered[len(ordered) // 2], spread=spread)


def first_difference(found: Results, expected: Results, promise: str = METRICS) -> str:
    """The first thing in which a run breaks a promise; "" if it keeps it.

    Args:
      found: the results of the run.
      expected: those of an undisturbed one.
      promise: `METRICS`, `STATE` or `LOSS`.
    """
    if promise == METRICS:
        difference = _of_rows(found, expected)
    else:
        difference = _of_the_end(found, expected, is_near=promise == LOSS)
    if difference:
        return difference
    if found.step != expected.step:
        return f"the last checkpoint is of step {found.step}, not {expected.step}"
    for path in {**expected.tensors, **found.tensors} if promise != LOSS else ():
        difference = _differ(found.tensors.get(path), expected.tensors.get(path))
        if difference:
            return f"the last checkpoint: {path} {difference}"
    return ""


def _of_rows(found: Results, expected: Results) -> str:
    """The first difference of the metrics of all steps; "" if they are equal."""
    for step in sorted({*found.values, *expected.values}):
        ours, theirs = found.values.get(step, {}), expected.values.get(step, {})
        for name in {**theirs, **ours}:
            difference = _differ(ours.get(name), theirs.get(name))
            if difference:
                return f"step {step}: {name} {difference}"
    return ""


def _of_the_end(found: Results, expected: Results, is_near: bool) -> str:
    """A step that is missing, or a last held-out loss elsewhere; "" without."""
    if missing := sorted(expected.values.keys() - found.values.keys()):
        return f"step {missing[0]} is missing"
    ours, theirs = found.last_loss, expected.last_loss
    apart = expected.spread + _NEAR * abs(theirs) if is_near else 0.0
    if abs(ours - theirs) <= apart:
        return ""
    return f"the last held-out loss is {ours}, not {theirs}"


def _differ(found: Any, expected: Any) -> str:
    """The difference of two numbers or arrays in words; "" if their bits are equal."""
    if found is None or expected is None:
        return "is missing" if found is None else "should not be there"
    found, expected = np.asarray(found), np.asarray(expected)
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"is {found.dtype}{found.shape}, not {expected.dtype}{expected.shape}"
    if found.tobytes() == expected.tobytes():
        return ""
    if not found.shape:
        return f"is {found!s}, not {expected!s}"
    return f"has {np.sum(found != expected)} other values"
