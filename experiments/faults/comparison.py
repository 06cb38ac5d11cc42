"""Comparison of two runs: metrics of every step, evaluations, state."""

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Mapping
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
"""Largest relative difference of losses that are near."""


@dataclasses.dataclass(frozen=True)
class Results:
    """The results that a run leaves behind.

    Attributes:
      values: {step: {metric: value}}, the held-out loss among them.
      step: that of the newest checkpoint.
      tensors: {path: array} of that checkpoint: parameters, optimizer, all else.
    """

    values: Mapping[int, Mapping[str, float]]
    step: int
    tensors: Mapping[str, np.ndarray]


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
    """All arrays of one item of a checkpoint, on the host."""
    handler = ocp.PyTreeCheckpointHandler()
    with contextlib.closing(ocp.Checkpointer(handler)) as reader:
        tree = reader.metadata(item).item_metadata.tree
        arguments = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree
        )
        whole = ocp.args.PyTreeRestore(item=tree, restore_args=arguments)
        return leaves_by_path(reader.restore(item, args=whole))


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
        difference = _of_the_end(found, expected, 0.0 if promise == STATE else _NEAR)
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


def _of_the_end(found: Results, expected: Results, tolerance: float) -> str:
    """A step that is missing, or a last held-out loss elsewhere; "" without."""
    if missing := sorted(expected.values.keys() - found.values.keys()):
        return f"step {missing[0]} is missing"
    ours, theirs = (
        x.values[max(expected.values)].get(metrics.EVALUATION_LOSS, math.nan)
        for x in (found, expected)
    )
    if abs(ours - theirs) <= tolerance * abs(theirs):
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
