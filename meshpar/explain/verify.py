"""Equivalence: a layout trains the model of a plain loop, tensor by tensor.

Training and evaluation are compared, and the compiled program is held to its contract.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshpar.arrays import is_key, parameter_path
from meshpar.contracts.shares import Shares
from meshpar.errors import MeshparError
from meshpar.explain.judge import LoopStep, PlainLoop, reason_no_judge
from meshpar.layouts.param import follows_load
from meshpar.lowering.layer_rows import LayerRows
from meshpar.lowering.train_program import TrainProgram
from meshpar.ops.experts.statistics import DEVICE_LOAD

_FLOOR = 1e-2
"""The smallest norm against which a tensor's error is measured, as a part of all norms.

Some gradients are zero but for rounding (a key bias under softmax): their error counts
beside the other tensors of their kind, not beside themselves.
"""

_SLACK = 4.0
"""Times the change by one rounding of the start that a tensor may differ."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One tensor at one step, under the layout and as it should be.

    Attributes:
      step: training step, from 1; 0 for the weights at the start.
      kind: "evaluation", "loss", "gradient", "grad_norm", "metric", "optimizer",
        "weight" or "state" (running statistics, other variables that are no parameters,
        and biases that balance experts).
      tensor: path of the tensor in the module, or name of the metric; "" for loss and
        grad_norm.
      error: norm of the difference, less what one rounding of the start may explain,
        over the norm of the reference; of a weight, over that of its change since then.
      tolerance: largest error that counts as rounding.
      values: the element that differs most, under the layout and as it should be.
    """

    step: int
    kind: str
    tensor: str
    error: float
    tolerance: float
    values: tuple[float, float] = (math.nan, math.nan)

    @property
    def ok(self) -> bool:
        """Whether the tensors are equal within rounding; NaN is not."""
        return bool(self.error <= self.tolerance)

    def __str__(self) -> str:
        found, wanted = self.values
        return (
            f"first {self.kind} {self.tensor} at step {self.step}, relative error "
            f"{self.error:.1e} above {self.tolerance:.0e} ({found:.6g} where it should "
            f"be {wanted:.6g})"
        )


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """All comparisons of one verification, in order, and the contract.

    Attributes:
      comparisons: in the order of the steps.
      violations: of the contract.
      judge: what the program was compared with.
      shares: how much of what the program moves was declared exactly.
    """

    comparisons: tuple[Comparison, ...]
    violations: tuple[str, ...] = ()
    judge: str = "one device"
    shares: Shares | None = None

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
            return str(first)
        return "; ".join(self.violations)

    def __str__(self) -> str:
        if self.first_difference is not None:
            return f"DIFFERENT from {self.judge}: {self.problem}"
        if self.violations:
            return f"CONTRACT BROKEN: {self.problem}"
        steps = max((c.step for c in self.comparisons), default=0)
        return f"EQUAL to {self.judge}: {steps} steps, {len(self.comparisons)} tensors"


@dataclasses.dataclass(frozen=True)
class Group:
    """Tensors of one step that are compared together.

    Attributes:
      kind: as in `Comparison`.
      tensors: {path in the module: array}.
      rounding: {path: norm} of the change that one rounding of the start makes of a
        tensor, where that is known; weights are compared there alone.
      start: {path: array} of weights before they were trained. The error of a weight is
        relative to its change since; where there is no start, to the weight itself.
    """

    kind: str
    tensors: dict[str, Any]
    rounding: dict[str, float] | None = None
    start: Mapping[str, Any] | None = None

    def norms(self) -> dict[str, float]:
        """The scale of errors of each tensor, {path: norm}."""
        start = self.start or dict.fromkeys(self.tensors, 0.0)
        changes = {p: np.float64(x) - start[p] for p, x in self.tensors.items()}
        return {path: float(np.linalg.norm(x)) for path, x in changes.items()}


def compare(
    step: int, tested: Mapping[str, Any], expected: Group, tolerance: float
) -> Iterator[Comparison]:
    """Compares the tensors of one group, the errors relative to those expected.

    Args:
      step: number of the step.
      tested: {path: array}, of these tensors at least.
      expected: the tensors as they should be.
      tolerance: largest relative error that counts as rounding.
    """
    wanted = {path: np.asarray(x, np.float64) for path, x in expected.tensors.items()}
    norms = expected.norms()
    floor = _FLOOR * float(np.linalg.norm(list(norms.values())))
    for path, reference in wanted.items():
        found = np.asarray(tested[path], np.float64)
        differences = np.abs(found - reference)
        slack = _SLACK * (expected.rounding or {}).get(path, 0.0)
        scale = max(norms[path], floor) or 1.0
        # Not max(): it may hide a NaN.
        error = (float(np.linalg.norm(differences)) - slack) / scale
        error = 0.0 if error < 0 else error
        values = (math.nan, math.nan)
        if differences.size:
            worst = np.unravel_index(differences.argmax(), differences.shape)
            values = float(found[worst]), float(reference[worst])
        yield Comparison(step, expected.kind, path, error, tolerance, values)


def _optimizer_groups(state: Any, rows: LayerRows) -> dict[str, dict[str, Any]]:
    """{part of the optimizer state, such as mu or nu: {path in the module: array}}."""
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
        names = rows.rows.get(parameter_path(keys, rows.rows), ())
        text, own = jax.tree_util.keystr(keys), groups.setdefault(part, {})
        if names and np.shape(leaf)[:1] == (len(names),):
            own |= {f"{text} {name}": leaf[i] for i, name in enumerate(names)}
        else:
            own[text] = leaf
    return groups


def _by_module(state: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Groups variables by module, so that a mean near 0 shares its variance's scale."""
    modules: dict[str, dict[str, Any]] = {}
    for path, x in state.items():
        modules.setdefault(path.rpartition("/")[0], {})[path] = x
    return modules.values()


def weight_groups(
    weights: Mapping[str, Any],
    moved: Mapping[str, Any] | None = None,
    start: Mapping[str, Any] | None = None,
) -> list[Group]:
    """Groups the weights after a step by module.

    Args:
      weights: {path in the module: array}.
      moved: what became of them from a start that was moved by one rounding; None for
        weights that are to be compared with others.
      start: the weights before the first step.
    """
    return [
        Group("weight", own, _rounding(own, moved), start)
        for own in _by_module(weights)
    ]


def _rounding(
    tensors: Mapping[str, Any], moved: Mapping[str, Any] | None
) -> dict[str, float] | None:
    """Norms of the changes of tensors, {path: norm}."""
    if moved is None:
        return None
    changes = {p: np.float64(moved[p]) - np.float64(x) for p, x in tensors.items()}
    return {path: float(np.linalg.norm(x)) for path, x in changes.items()}


def _groups(
    program: TrainProgram, step: LoopStep, start: Mapping[str, Any] | None = None
) -> list[Group]:
    """The tensors of one step.

    Args:
      program: says which variables are what.
      step: of the program or of the judge, on the host; its optimizer state as programs
        store it, layers in the order of the model.
      start: variables before the first step.
    """
    rows = program.model_rows
    params = rows.unstacked(program.model.params, lambda param, _: param)
    loads = {path for path, param in params.items() if follows_load(param.names)}
    kept = {p: x for p, x in step.variables.items() if params[p].is_state or p in loads}
    weights = {p: x for p, x in step.variables.items() if p not in kept}
    slopes = {p: x for p, x in step.gradients.items() if p not in loads}
    metrics = {n: x for n, x in step.metrics.items() if n != DEVICE_LOAD}
    parts = _optimizer_groups(step.optimizer_state, rows)
    return [
        *(Group("evaluation", {name: x}) for name, x in step.evaluation.items()),
        Group("loss", {"": metrics.pop("loss")}),
        Group("gradient", slopes),
        Group("gradient", {p: step.gradients[p] for p in loads & {*step.gradients}}),
        Group("grad_norm", {"": metrics.pop("grad_norm")}),
        *(Group("metric", {name: x}) for name, x in metrics.items()),
        *(Group("optimizer", tensors) for tensors in parts.values()),
        *(Group("state", tensors) for tensors in _by_module(kept)),
        *weight_groups(weights, start=start),
    ]


def record(
    program: TrainProgram,
    batches: Iterable[Any],
    seed: int = 0,
    start: Mapping[str, Any] | None = None,
) -> Iterator[list[Group]]:
    """Trains and yields the tensors of the start and of every step, on the host.

    Args:
      program: the program.
      batches: host batches, one per step.
      seed: seed of the run.
      start: {path in the module: array} that the first step begins with, in place of
        the first weights, as programs round them differently.
    """
    state, rows = program.init(seed), program.model_rows
    own = jax.device_get(program.in_model_order(state).params)
    yield [Group("weight", rows.unstacked(own))]
    if start is not None:
        kinds = rows.unstacked(program.model.params, lambda param, _: param)
        given = {path: x for path, x in start.items() if not kinds[path].is_state}
        state = program.init(seed, params=given)
    for batch in batches:
        evaluation = jax.device_get(program.evaluate(state, batch))
        gradients = jax.device_get(program.gradients(state, batch)[1])
        state, metrics = program.step(state, batch)
        whole = jax.device_get(program.in_model_order(state))
        variables, gradients = map(rows.unstacked, (whole.params, gradients))
        metrics = jax.device_get(metrics)
        yield _groups(
            program,
            LoopStep(evaluation, metrics, gradients, variables, whole.optimizer_state),
        )


def judged(
    program: TrainProgram, batches: Sequence[Any], seed: int = 0
) -> Iterator[list[Group]]:
    """The tensors of the start and of every step of a plain loop (`explain.judge`).

    Args:
      program: the program to be judged.
      batches: host batches, one per step.
      seed: seed of the run.
    """
    loop, rows = PlainLoop.of(program), program.model_rows
    fresh = loop.init(seed)
    start = {path: np.asarray(x) for path, x in fresh.items()}
    yield weight_groups(start, start)
    steps = loop.run(fresh, batches), loop.run(fresh, batches, moved=True)
    for pair in zip(*steps, strict=True):
        states = (jax.device_get(loop.stored(x.optimizer_state, rows)) for x in pair)
        whole = map(lambda x, s: x._replace(optimizer_state=s), pair, states)
        groups = (_groups(program, step, start) for step in whole)
        yield [
            dataclasses.replace(own, rounding=_rounding(own.tensors, moved.tensors))
            for own, moved in zip(*groups, strict=True)
        ]


def verify(
    program: TrainProgram,
    reference: TrainProgram | Sequence[list[Group]] | None,
    batches: Iterable[Any],
    seed: int = 0,
    tolerance: float = 1e-5,
) -> VerifyReport:
    """Trains a program beside its judge and compares every tensor in every step.

    Each step evaluates its batch with the weights that it starts from, and then trains.
    What one rounding of the first weights makes of a tensor is no error: Adam turns
    gradients that are rounding noise into whole steps. Only the judge can tell how much
    that is, so weights are compared with it alone.

    Args:
      program: the program under test.
      reference: None for the judge, a plain loop of the user's module on one device.
        For a second opinion, the same model and optimizer on one device, or what
        `record` made of them with the same batches and seed.
      batches: host batches, one per step: any of your own with the shapes of the
        program.
      seed: seed of both runs.
      tolerance: largest relative error that counts as rounding.

    Returns:
      All comparisons, and the violations of the contract of `program`.

    Raises:
      MeshparError: the run has several processes, so one device cannot hold both; the
        program trains with stale weights, which is another algorithm; or there is no
        judge (`reason_no_judge`).
    """
    if program.reason_not_equal:
        raise MeshparError(program.reason_not_equal)
    if jax.process_count() > 1:
        raise MeshparError("verify compares with one device: run it in one process")
    batches, judge = list(batches), "one device"
    if reference is None:
        if reason := reason_no_judge(program):
            raise MeshparError(f"no plain loop can judge this program: {reason}")
        expected, judge = judged(program, batches, seed), "a plain loop"
    elif isinstance(reference, TrainProgram):
        expected = record(reference, batches, seed)
    else:
        expected = iter(reference)
    comparisons: list[Comparison] = []
    first = next(expected)
    start = {path: x for group in first for path, x in group.tensors.items()}
    own = record(program, batches, seed, start)
    steps = zip(own, itertools.chain([first], expected), strict=True)
    for step, (tested, wanted) in enumerate(steps):
        found: dict[str, dict[str, Any]] = {}
        for group in tested:
            found.setdefault(group.kind, {}).update(group.tensors)
        for group in wanted:
            if group.kind != "weight" or group.rounding is not None:
                comparisons += compare(step, found[group.kind], group, tolerance)
    violations, shares = tuple(program.violations()), Shares.of(*program.busiest)
    return VerifyReport(tuple(comparisons), violations, judge, shares)
