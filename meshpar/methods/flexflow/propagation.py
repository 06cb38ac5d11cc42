"""Propagates the layouts of an operator's operands to its results.

An axis that splits operands along one factor splits the operator along it. Where an
axis splits operands along different factors, the one that moves the fewest bytes is
taken, and the other operands are gathered or exchanged. A sum over a factor that is
split gives partial sums, which are reduced, or scattered if their reader splits them.

Compilers decide so too, by heuristics of their own; this is a model of them.

Source: Jia et al., arXiv:1807.05358, section 5.1 (communication between operators).
"""

import dataclasses
import functools
import math

from meshpar.contracts import cost
from meshpar.layouts.axes import GATHERED_AXES
from meshpar.methods.flexflow.dims import WHOLE
from meshpar.methods.flexflow.graph import ROW, STACK, VIEWS, Graph, Operator
from meshpar.methods.flexflow.transfers import (
    EXCHANGE,
    GATHER,
    NOTHING,
    REDUCE,
    Split,
    Target,
    TensorLayout,
    Transfer,
    Transfers,
    dim_of,
    without_axis,
)


@dataclasses.dataclass(frozen=True)
class Step:
    """One operator on a mesh.

    Attributes:
      results: layout of each result.
      before: transfers of its operands.
      after: transfers of its results.
      ways: devices that share its work.
      moved: bytes that a device reads and writes.
    """

    results: tuple[TensorLayout, ...]
    before: tuple[Transfer, ...]
    after: tuple[Transfer, ...]
    ways: int
    moved: float


class Propagation:
    """The operators of one graph on a mesh of some sizes."""

    def __init__(
        self,
        graph: Graph,
        sizes: dict[str, int],
        reduces_late: bool,
        zero_level: int = 3,
    ):
        """Prepares the graph.

        Args:
          graph: of a step.
          sizes: {axis: size} of the axes larger than 1.
          reduces_late: as of `mesh.platform.Platform`.
          zero_level: of the layout; below 3 all weights are whole before they are read.
        """
        self.graph, self.sizes = graph, sizes
        self.transfers = Transfers(graph, sizes, reduces_late)
        self.zero_level = zero_level
        self._linear_names = _LINEAR | {"add_any"} if reduces_late else _LINEAR
        self._steps: dict[tuple, Step] = {}

    def step(
        self,
        index: int,
        operands: tuple[TensorLayout, ...],
        target: Target | None = None,
        wanted: Split | None = None,
    ) -> Step:
        """Propagates layouts through one operator.

        Args:
          index: of the operator.
          operands: their layouts.
          target: layout that the model asks for, if the operator is a constraint.
          wanted: layout that a gradient shall have, if the operator makes one.
        """
        key = index, operands, target, wanted
        if key not in self._steps:
            op = self.graph.operators[index]
            if op.target is not None and target is not None:
                self._steps[key] = self._constrained(op, operands, target)
            else:
                self._steps[key] = self._step(op, operands, wanted)
        return self._steps[key]

    def _constrained(
        self, op: Operator, operands: tuple[TensorLayout, ...], target: Target
    ) -> Step:
        """A constraint of the model: its dims are split as it says."""
        (tensor,), (held,) = op.operands, operands
        split = tuple(
            now if asked is None else asked
            for now, asked in zip(held.split, target, strict=True)
        )
        moves = self.transfers.resolved(tensor, held, split, op.times)
        return Step((TensorLayout(split),), tuple(moves), (), 1, 0.0)

    def _step(
        self,
        op: Operator,
        operands: tuple[TensorLayout, ...],
        wanted: Split | None = None,
    ) -> Step:
        if op.name in self._linear_names and any(held.partial for held in operands):
            if (summed := self._linear(op, operands)) is not None:
                return summed
        operands, before = self._gathered(op, operands)
        chosen: dict[int, frozenset[str]] = {}
        for axis in self.sizes:
            factor = self._factor(op, operands, axis, chosen)
            if factor is None and wanted is not None:
                factor = self._wanted_factor(op, operands, axis, chosen, wanted)
            if factor is not None:
                chosen[factor] = chosen.get(factor, NOTHING) | {axis}
        splits = [
            tuple(chosen.get(factor, NOTHING) for factor in dims)
            for dims in op.rule.operands
        ]
        for tensor, held, split in zip(op.operands, operands, splits, strict=True):
            times = self.graph.tensors[tensor].times
            before += self.transfers.resolved(tensor, held, split, times)
        work = NOTHING.union(*chosen.values())
        return self._finished(op, chosen, splits, before, work)

    def _gathered(
        self, op: Operator, operands: tuple[TensorLayout, ...]
    ) -> tuple[tuple[TensorLayout, ...], list[Transfer]]:
        """Operands with weights whole over fsdp; zero=3 gathers stacks row by row."""
        held, before = list(operands), []
        for place, tensor in enumerate(op.operands):
            by_row = op.name == ROW and self.zero_level == 3
            if by_row or tensor not in self.weights:
                continue
            bare = held[place].split
            for axis in GATHERED_AXES:
                bare = without_axis(bare, axis)
            times = self.graph.tensors[tensor].times
            before += self.transfers.resolved(tensor, held[place], bare, times)
            held[place] = TensorLayout(bare)
        return tuple(held), before

    @functools.cached_property
    def weights(self) -> frozenset[int]:
        """Tensors of parameters, rows of stacked ones, and views of them."""
        found = set(self.graph.params.values())
        for op in self.graph.operators:
            if op.name in VIEWS | {ROW} and op.operands:
                if found.issuperset(op.operands):
                    found.update(op.results)
        return frozenset(found)

    def _finished(
        self,
        op: Operator,
        chosen: dict[int, frozenset[str]],
        splits: list[Split],
        before: list[Transfer],
        work: frozenset[str],
    ) -> Step:
        """The step of an operator whose factors are split."""
        results, after = [], []
        graph, kept = self.graph, {f for dims in op.rule.results for f in dims}
        lost = (axes for factor, axes in chosen.items() if factor not in kept)
        summed = NOTHING.union(*lost)
        for tensor, dims in zip(op.results, op.rule.results, strict=True):
            split = tuple(chosen.get(factor, NOTHING) for factor in dims)
            held = TensorLayout(split, summed)
            if summed and tensor not in self._deferred:
                after += self.transfers.resolved(tensor, held, split, op.times)
                held = TensorLayout(split)
            results.append(held)
        moved = 0.0
        if any(tensor in graph.stored for tensor in op.results):
            for tensor, split in zip(op.operands, splits, strict=True):
                moved += graph.read_bytes[tensor] / self.transfers.ways(split)
            for tensor, held in zip(op.results, results, strict=True):
                if tensor in graph.stored:
                    moved += self.transfers.local_bytes(tensor, held.split)
        ways = math.prod(self.sizes[axis] for axis in work)
        return Step(tuple(results), tuple(before), tuple(after), ways, moved)

    def _factor(
        self,
        op: Operator,
        operands: tuple[TensorLayout, ...],
        axis: str,
        chosen: dict[int, frozenset[str]],
    ) -> int | None:
        """The factor that an axis splits, or None."""
        factors: list[int] = []
        for held, dims in zip(operands, op.rule.operands, strict=True):
            dim = dim_of(held.split, axis)
            if dim is not None and dims[dim] not in (WHOLE, *factors):
                factors.append(dims[dim])
        legal = [f for f in factors if self._divides(op, f, axis, chosen)]
        if len(legal) < 2:
            return legal[0] if legal else None
        costs = [self._cost(op, operands, axis, factor) for factor in legal]
        return legal[costs.index(min(costs))]

    def _wanted_factor(
        self,
        op: Operator,
        operands: tuple[TensorLayout, ...],
        axis: str,
        chosen: dict[int, frozenset[str]],
        wanted: Split,
    ) -> int | None:
        """The factor of the dim that an axis shall split, if operands are whole."""
        dim = dim_of(wanted, axis)
        if dim is None or any(axis in held.partial for held in operands):
            return None
        factor = op.rule.results[0][dim]
        if factor not in op.rule.sizes:
            return None
        return factor if self._divides(op, factor, axis, chosen) else None

    def _divides(
        self, op: Operator, factor: int, axis: str, chosen: dict[int, frozenset[str]]
    ) -> bool:
        ways = self.sizes[axis]
        ways *= math.prod(self.sizes[a] for a in chosen.get(factor, ()))
        return op.rule.sizes[factor] % ways == 0

    def _cost(
        self, op: Operator, operands: tuple[TensorLayout, ...], axis: str, factor: int
    ) -> float:
        """Bytes sent if an axis splits a factor: of operands, and of partial sums."""
        n, total = self.sizes[axis], 0.0
        rule = op.rule
        for tensor, held, dims in zip(
            op.operands, operands, rule.operands, strict=True
        ):
            dim = dim_of(held.split, axis)
            if dim is None or dims[dim] == factor:
                continue
            size = self.transfers.local_bytes(tensor, held.split)
            kind = EXCHANGE if factor in dims else GATHER
            payload = size if kind == EXCHANGE else size * n
            total += cost.wire_bytes(kind, payload, n)
        for tensor, dims in zip(op.results, rule.results, strict=True):
            if factor not in dims:
                size = self.graph.tensors[tensor].size
                rest = {a for h in operands for axes in h.split for a in axes} - {axis}
                size /= math.prod(self.sizes[a] for a in rest)
                total += cost.wire_bytes(REDUCE, size, n)
        return total

    def _linear(self, op: Operator, operands: tuple[TensorLayout, ...]) -> Step | None:
        """Passes partial sums through an operator that keeps sums, if it does here."""
        partial = {held.partial for held in operands}
        if len(partial) > 1 or len({held.split for held in operands}) > 1:
            return None
        bare = tuple(TensorLayout(held.split) for held in operands)
        step = self._step(op, bare)
        if step.before or step.after:
            return None
        (axes,) = partial
        results, after = [], []
        for tensor, held in zip(op.results, step.results, strict=True):
            summed = TensorLayout(held.split, axes)
            if tensor not in self._deferred:
                after += self.transfers.resolved(tensor, summed, held.split, op.times)
                summed = held
            results.append(summed)
        return dataclasses.replace(step, results=tuple(results), after=tuple(after))

    @functools.cached_property
    def _deferred(self) -> frozenset[int]:
        """Tensors whose partial sums are reduced where their only reader wants them."""
        graph = self.graph
        gradients = set(graph.gradients.values())
        return frozenset(
            tensor
            for tensor in range(len(graph.tensors))
            if len(graph.readers.get(tensor, ())) + (tensor in gradients) == 1
            and (tensor in gradients or tensor not in graph.outputs)
        )


_LINEAR = (VIEWS - {"broadcast_in_dim", "iota"}) | {STACK}
"""Operators of one operand whose result is the sum of what they make of its parts."""
