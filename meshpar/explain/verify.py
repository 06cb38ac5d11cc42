"""Equivalence: a layout trains the same model as one device, tensor by tensor.

The compiled program is held to its contract as well.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from meshpar.arrays import is_key
from meshpar.errors import MeshparError
from meshpar.lowering.train_program import TrainProgram

_FLOOR = 1e-2
"""The smallest norm against which a tensor's error is measured, as a part of all norms.

Some gradients are zero but for rounding (a key bias under softmax): their error counts
beside the other tensors of their kind, not beside themselves.
"""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One tensor at one step, under the layout and on one device.

    Attributes:
      step: training step, from 1.
      kind: "loss", "gradient", "grad_norm" or "optimizer".
      tensor: path of the tensor; "" for scalars.
      error: norm of the difference over the norm of the reference.
      tolerance: largest error that counts as rounding.
    """

    step: int
    kind: str
    tensor: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the tensors are equal within rounding; NaN is not."""
        return bool(self.error <= self.tolerance)


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """All comparisons of one verification, in order, and violations of the contract."""

    comparisons: tuple[Comparison, ...]
    violations: tuple[str, ...] = ()

    @property
    def first_difference(self) -> Comparison | None:
        """The first tensor that differs."""
        return next((c for c in self.comparisons if not c.ok), None)

    @property
    def ok(self) -> bool:
        """Whether all tensors are equal and the contract is kept."""
        return self.first_difference is None and not self.violations


def _compare(
    step: int,
    kind: str,
    tested: dict[str, Any],
    expected: dict[str, Any],
    tolerance: float,
) -> list[Comparison]:
    """Compares the tensors of one kind, the errors relative to those expected."""
    tested = {path: np.asarray(x, np.float64) for path, x in tested.items()}
    expected = {path: np.asarray(x, np.float64) for path, x in expected.items()}
    norms = {path: float(np.linalg.norm(x)) for path, x in expected.items()}
    floor = _FLOOR * float(np.linalg.norm(list(norms.values())))
    comparisons = []
    for path, reference in expected.items():
        difference = float(np.linalg.norm(tested[path] - reference))
        scale = max(norms[path], floor) or 1.0
        comparisons.append(Comparison(step, kind, path, difference / scale, tolerance))
    return comparisons


def _optimizer_groups(state: Any) -> dict[str, dict[str, Any]]:
    """{part of the optimizer state, such as mu or nu: {path: array}}."""
    groups: dict[str, dict[str, Any]] = {}
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    for keys, leaf in leaves:
        part = "/".join(
            str(getattr(k, "name", getattr(k, "idx", "")))
            for k in keys
            if not isinstance(k, jax.tree_util.DictKey)
        )
        if is_key(leaf):
            leaf = jax.random.key_data(leaf)
        groups.setdefault(part, {})[jax.tree_util.keystr(keys)] = leaf
    return groups


def verify(
    program: TrainProgram,
    reference: TrainProgram,
    batches: Iterable[Any],
    seed: int = 0,
    tolerance: float = 1e-5,
) -> VerifyReport:
    """Trains both programs side by side and compares every tensor after every step.

    Parameters are not compared themselves: Adam turns gradients that are rounding
    noise into whole steps, and the losses, gradients and moments of the steps that
    follow show every difference that matters.

    Args:
      program: the program under test.
      reference: the same model and optimizer on one device.
      batches: host batches, one per step.
      seed: seed of both runs.
      tolerance: largest relative error that counts as rounding.

    Returns:
      All comparisons, and the violations of the contract of `program`.

    Raises:
      MeshparError: the run has several processes, so one device cannot hold both; or
        the program trains with stale weights, which is another algorithm.
    """
    if program.reason_not_equal:
        raise MeshparError(program.reason_not_equal)
    if jax.process_count() > 1:
        raise MeshparError("verify compares with one device: run it in one process")
    states = [p.init(seed) for p in (program, reference)]
    comparisons: list[Comparison] = []
    for step, batch in enumerate(batches, start=1):
        gradients, metrics = [], []
        for i, p in enumerate((program, reference)):
            gradients.append(p.gradients(states[i], batch)[1])
            states[i], step_metrics = p.step(states[i], batch)
            metrics.append(jax.device_get(step_metrics))
        for kind in ("loss", "grad_norm"):
            scalars = [{"": m[kind]} for m in metrics]
            comparisons += _compare(step, kind, *scalars, tolerance)
            if kind == "loss":
                comparisons += _compare(step, "gradient", *gradients, tolerance)
        tested, expected = (
            _optimizer_groups(p.in_model_order(state).optimizer_state)
            for p, state in zip((program, reference), states, strict=True)
        )
        for part in expected:
            pair = tested[part], expected[part]
            comparisons += _compare(step, "optimizer", *pair, tolerance)
    return VerifyReport(tuple(comparisons), tuple(program.violations()))
