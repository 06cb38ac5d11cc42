"""Equivalence: a layout trains the same model as one device, tensor by tensor.

Training and evaluation are compared, and the compiled program is held to its contract.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from meshpar.arrays import is_key
from meshpar.errors import MeshparError
from meshpar.layouts.param import follows_load
from meshpar.lowering.train_program import TrainProgram
from meshpar.ops.experts.statistics import DEVICE_LOAD

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
      kind: "evaluation", "loss", "gradient", "grad_norm", "metric", "optimizer" or
        "state" (running statistics, other variables that are no parameters, and biases
        that balance experts).
      tensor: path of the tensor, or name of the metric; "" for loss and grad_norm.
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
        return not self.problem

    @property
    def problem(self) -> str:
        """The first tensor that differs, or the violations; "" if all is well."""
        if first := self.first_difference:
            return (
                f"first {first.kind} {first.tensor} at step {first.step}, relative "
                f"error {first.error:.1e} above {first.tolerance:.0e}"
            )
        return "; ".join(self.violations)


@dataclasses.dataclass(frozen=True)
class Group:
    """Tensors of one step whose errors are measured beside each other.

    Attributes:
      kind: as in `Comparison`.
      tensors: {path: array}.
    """

    kind: str
    tensors: dict[str, Any]


def _compare(
    step: int, tested: Group, expected: Group, tolerance: float
) -> Iterator[Comparison]:
    """Compares the tensors of one group, the errors relative to those expected."""
    found = {path: np.asarray(x, np.float64) for path, x in tested.tensors.items()}
    wanted = {path: np.asarray(x, np.float64) for path, x in expected.tensors.items()}
    norms = {path: float(np.linalg.norm(x)) for path, x in wanted.items()}
    floor = _FLOOR * float(np.linalg.norm(list(norms.values())))
    for path, reference in wanted.items():
        difference = float(np.linalg.norm(found[path] - reference))
        scale = max(norms[path], floor) or 1.0
        yield Comparison(step, expected.kind, path, difference / scale, tolerance)


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


def _by_module(state: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """The variables of each module: a mean near 0 counts beside its variance."""
    modules: dict[str, dict[str, Any]] = {}
    for path, x in state.items():
        modules.setdefault(path.rpartition("/")[0], {})[path] = x
    return modules.values()


def record(
    program: TrainProgram, batches: Iterable[Any], seed: int = 0
) -> Iterator[list[Group]]:
    """Trains and yields the tensors of every step, on the host.

    Args:
      program: the program.
      batches: host batches, one per step.
      seed: seed of the run.
    """
    state = program.init(seed)
    for batch in batches:
        evaluation = jax.device_get(program.evaluate(state, batch))
        gradients = jax.device_get(program.gradients(state, batch)[1])
        state, metrics = program.step(state, batch)
        metrics = jax.device_get(metrics)
        whole = program.in_model_order(state)
        parts = _optimizer_groups(jax.device_get(whole.optimizer_state))
        kept = {
            path: whole.params[path]
            for path, param in program.model.params.items()
            if param.is_state or follows_load(param.names)
        }
        slopes = program.lowering.plan.slopes(gradients)
        loads = {path: x for path, x in gradients.items() if path not in slopes}
        metrics.pop(DEVICE_LOAD, None)
        yield [
            *(Group("evaluation", {name: x}) for name, x in evaluation.items()),
            Group("loss", {"": metrics.pop("loss")}),
            Group("gradient", slopes),
            Group("gradient", loads),
            Group("grad_norm", {"": metrics.pop("grad_norm")}),
            *(Group("metric", {name: x}) for name, x in metrics.items()),
            *(Group("optimizer", tensors) for tensors in parts.values()),
            *(Group("state", tensors) for tensors in _by_module(jax.device_get(kept))),
        ]


def verify(
    program: TrainProgram,
    reference: TrainProgram | Sequence[list[Group]],
    batches: Iterable[Any],
    seed: int = 0,
    tolerance: float = 1e-5,
) -> VerifyReport:
    """Trains both programs side by side and compares every tensor in every step.

    Each step evaluates its batch with the weights that it starts from, and then trains.
    Parameters are not compared themselves: Adam turns gradients that are rounding
    noise into whole steps, and the losses, gradients and moments of the steps that
    follow show every difference that matters.

    Args:
      program: the program under test.
      reference: the same model and optimizer on one device, or what `record` made of
        them with the same batches and seed.
      batches: host batches, one per step: any of your own with the shapes of the
        program.
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
    batches = list(batches)
    if isinstance(reference, TrainProgram):
        expected_steps = record(reference, batches, seed)
    else:
        expected_steps = iter(reference)
    comparisons: list[Comparison] = []
    steps = zip(record(program, batches, seed), expected_steps, strict=True)
    for step, (tested, expected) in enumerate(steps, start=1):
        for pair in zip(tested, expected, strict=True):
            comparisons += _compare(step, *pair, tolerance)
    return VerifyReport(tuple(comparisons), tuple(program.violations()))
