"""Simulates one training step: operators and transfers on two timelines of a device.

A device computes operators in the order of the step. A transfer starts when its tensor
is there and the links are free, and an operator waits for the transfers of its
operands. So gradients travel while the backward pass goes on, and activations are
waited for.

Source: Jia et al., arXiv:1807.05358, section 5.2 (the full simulation algorithm); here
  all devices do the same, so that one of them stands for all.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from meshpar.contracts import cost
from meshpar.layouts.axes import HELD_AXES, SLOW_AXES, TOKEN_AXES
from meshpar.mesh.machine import Machine
from meshpar.mesh.platform import platform_named
from meshpar.methods.flexflow.graph import CARRY, STACK, Graph, Operator
from meshpar.methods.flexflow.propagation import Propagation, Step
from meshpar.methods.flexflow.transfers import (
    EXCHANGE,
    GATHER,
    Split,
    Target,
    TensorLayout,
    Transfer,
)

_HELD = frozenset(HELD_AXES) & frozenset(TOKEN_AXES)

_WEIGHTS, _ACTIVATIONS, _GRADIENTS = "weights", "activations", "gradients"


@dataclasses.dataclass(frozen=True)
class StepSeconds:
    """Predicted time of a step, by term.

    Attributes:
      matmuls: compute of matmuls and convolutions.
      operators: compute of all other operators, which memory bounds.
      weights: time in which the device waits for gathers of weights.
      activations: time in which it waits for activations, forward and backward.
      gradients: time in which it waits for sums of gradients.
      update: the optimizer.
      wire_bytes: bytes that one device sends in all.
    """

    matmuls: float
    operators: float
    weights: float
    activations: float
    gradients: float
    update: float
    wire_bytes: float

    @property
    def by_term(self) -> dict[str, float]:
        """{term: seconds}."""
        terms = dataclasses.asdict(self)
        del terms["wire_bytes"]
        return terms

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.by_term.values())

    def slower(self, times: float) -> "StepSeconds":
        """All terms so many times as long; the bytes stay."""
        terms = {name: times * value for name, value in self.by_term.items()}
        return dataclasses.replace(self, **terms)


class Strategy(NamedTuple):
    """A strategy: the layouts of weights, batch and constrained tensors.

    Attributes:
      weights: {path: axes per dim} of the parameters between steps, and of the
        gradients that the optimizer gets.
      batch: axes per dim of each leaf of the batch.
      targets: {operator: what a constraint of the model asks for}.
    """

    weights: Mapping[str, Split]
    batch: tuple[Split, ...]
    targets: Mapping[int, Target]


@dataclasses.dataclass(frozen=True)
class Simulated:
    """One step, simulated.

    Attributes:
      seconds: its time.
      activations: bytes that the forward pass leaves for the backward pass.
      peak: bytes at the peak, state and gradients aside.
      is_held: whether no weight is gathered over an axis that splits the batch and
        holds weights (`expert`). Compilers do not gather these: they split activations
        like the weights, against the batch (seen in jaxlib 0.12.0).
    """

    seconds: StepSeconds
    activations: int
    peak: int
    is_held: bool


class Simulator:
    """Simulates the steps of one graph on a mesh of some sizes."""

    def __init__(
        self,
        graph: Graph,
        sizes: Mapping[str, int],
        machine: Machine,
        zero_level: int = 3,
    ):
        """Prepares the graph.

        Args:
          graph: of a step.
          sizes: {axis: size} of the mesh, outer to inner.
          machine: that runs it.
          zero_level: of the layout; below 3 a step holds whole copies of the weights,
            which count as weights.
        """
        used = {axis: size for axis, size in sizes.items() if size > 1}
        self.graph, self.machine = graph, machine
        platform = platform_named(machine.devices[0].platform)
        self.propagation = Propagation(graph, used, platform.reduces_late, zero_level)
        self.bandwidths = _bandwidths(sizes, machine)

    def wanted(self, strategy: Strategy) -> dict[int, Split]:
        """{operator that makes a gradient: axes that shall split its result}."""
        return {
            index: tuple(
                frozenset() if dim is None else strategy.weights[path][dim]
                for dim in dims
            )
            for path, (index, dims) in self.graph.gradient_makers.items()
        }

    def run(self, strategy: Strategy, update: float = 0.0) -> Simulated:
        """Simulates a step.

        Args:
          strategy: layouts of weights, gradients, batch and constraints.
          update: seconds that the optimizer takes.
        """
        return _Run(self, strategy).finished(update)


class _Run:
    """The timelines of one step."""

    def __init__(self, simulator: Simulator, strategy: Strategy):
        graph = simulator.graph
        self.simulator, self.graph, self.strategy = simulator, graph, strategy
        self.held: dict[int, TensorLayout] = {
            graph.params[path]: TensorLayout(split)
            for path, split in strategy.weights.items()
        }
        self.held |= dict(
            zip(graph.batch, map(TensorLayout, strategy.batch), strict=True)
        )
        self.there: dict[int, float] = {}
        self.waits_for: dict[int, str] = {}
        self.computes = self.sends = self.wire = 0.0
        self.matmuls = self.operators = 0.0
        self.waited = dict.fromkeys((_WEIGHTS, _ACTIVATIONS, _GRADIENTS), 0.0)
        self.is_held, self.summed = True, 0.0
        self.wanted = simulator.wanted(strategy)
        self.copies: dict[tuple[int, TensorLayout], list] = {}

    def finished(self, update: float) -> Simulated:
        """Runs all operators, and waits for the sums of gradients."""
        for index in range(len(self.graph.operators)):
            self._operator(index)
        self._wait(self.summed, _GRADIENTS)
        seconds = StepSeconds(
            self.matmuls,
            self.operators,
            *self.waited.values(),
            update,
            wire_bytes=self.wire,
        )
        return Simulated(seconds, *self._memory(), self.is_held)

    def _held(self, tensor: int) -> TensorLayout:
        known = self.held.get(tensor)
        return known or TensorLayout(
            (frozenset(),) * len(self.graph.tensors[tensor].shape)
        )

    def _operator(self, index: int) -> None:
        op = self.graph.operators[index]
        if op.name == CARRY:
            step = self._carried(index, op)
        else:
            step = self._step(index, self._held)
        for tensor in op.operands:
            self._wait(self.there.get(tensor, 0.0), self.waits_for.get(tensor, ""))
        for transfer in step.before:
            is_weight = transfer.tensor in self.simulator.propagation.weights
            term = _WEIGHTS if is_weight else _ACTIVATIONS
            self.is_held &= not (is_weight and transfer.axis in _HELD)
            self._wait(self._send(transfer, index, term), term)
        self._compute(op.flops, op.times, step)
        for tensor, held in zip(op.results, step.results, strict=True):
            self.held[tensor], self.there[tensor] = held, self.computes
        for transfer in step.after:
            end = self._send(transfer, index, _ACTIVATIONS)
            self.there[transfer.tensor] = end
            self.waits_for[transfer.tensor] = _ACTIVATIONS
        for tensor in op.results:
            for path in self.graph.paths_of.get(tensor, ()):
                self._sum_gradient(tensor, self.strategy.weights[path], index)

    def _sum_gradient(self, tensor: int, split: Split, index: int) -> None:
        """Sends a gradient as soon as it is there; the update waits for all."""
        resolved = self.simulator.propagation.transfers.resolved
        for transfer in resolved(tensor, self._held(tensor), split, 1):
            end = self._send(transfer, index, _GRADIENTS)
            self.summed = max(self.summed, end)

    def _step(self, index: int, held: Callable[[int], TensorLayout]) -> Step:
        """Propagates through an operator, with its operands laid out as `held` says."""
        operands = tuple(map(held, self.graph.operators[index].operands))
        target = self.strategy.targets.get(index)
        wanted = self.wanted.get(index)
        return self.simulator.propagation.step(index, operands, target, wanted)

    def _carried(self, index: int, op: Operator) -> Step:
        """Lays out the carry of a loop as its first round leaves it."""
        seen = dict(zip(op.results, map(self._held, op.operands), strict=True))

        def held(tensor: int) -> TensorLayout:
            return seen.get(tensor) or self._held(tensor)

        makers = self.graph.makers
        for inner in range(index + 1, max(makers.get(t, index) for t in op.back) + 1):
            results = self.graph.operators[inner].results
            seen.update(zip(results, self._step(inner, held).results, strict=True))
        after = tuple(TensorLayout(held(tensor).split) for tensor in op.back)
        before: list[Transfer] = []
        resolved = self.simulator.propagation.transfers.resolved
        for tensor, end in zip(op.operands, after, strict=True):
            before += resolved(tensor, self._held(tensor), end.split, op.times)
        return Step(after, tuple(before), (), 1, 0.0)

    def _compute(self, flops: float, times: int, step: Step) -> None:
        """Time of an operator: its FLOPs, or its bytes if they take longer."""
        machine = self.simulator.machine
        seconds = step.moved / machine.chip.memory_bandwidth
        if flops:
            seconds = max(seconds, flops / step.ways / machine.flops)
            self.matmuls += times * seconds
        else:
            self.operators += times * seconds
        self.computes += times * seconds

    def _wait(self, until: float, term: str) -> None:
        if until > self.computes:
            self.waited[term or _ACTIVATIONS] += until - self.computes
            self.computes = until

    def _send(self, transfer: Transfer, index: int, term: str) -> float:
        """The end of a transfer; one that was done for another reader costs 0.

        Without overlap nothing is computed meanwhile.
        """
        key = transfer.tensor, transfer.becomes
        if key in self.copies:
            self.copies[key][1] = index
            return self.copies[key][2]
        n = self.simulator.propagation.sizes[transfer.axis]
        size = cost.wire_bytes(transfer.kind, transfer.payload, n) * transfer.times
        start = max(self.sends, self.there.get(transfer.tensor, 0.0))
        if not self.simulator.machine.overlaps:
            start = max(start, self.computes)
        self.sends = start + size / self.simulator.bandwidths[transfer.axis]
        self.wire += size
        self.copies[key] = [index, index, self.sends, transfer.kind]
        if not self.simulator.machine.overlaps:
            self._wait(self.sends, term)
        return self.sends

    def _memory(self) -> tuple[int, int]:
        """(bytes between forward and backward pass, bytes at the peak)."""
        graph, ways = self.graph, self.simulator.propagation.transfers.ways
        change = [0.0] * (len(graph.operators) + 2)
        skipped = {*graph.params.values(), *graph.gradients.values(), *graph.rows}
        for tensor in graph.stored - skipped:
            last = graph.last_reads.get(tensor)
            if last is None:
                continue
            size = graph.tensors[tensor].size / ways(self._held(tensor).split)
            change[graph.makers.get(tensor, 0)] += size
            change[last + 1] -= size
        rules = self.simulator.propagation
        copied = rules.weights if rules.zero_level < 3 else frozenset()
        for (tensor, held), (first, last, _, kind) in self.copies.items():
            if kind not in (GATHER, EXCHANGE) or tensor in graph.outputs | copied:
                continue
            size = graph.tensors[tensor].size / ways(held.split)
            change[first] += size
            change[last + 1] -= size
        for path, tensor in graph.gradients.items():
            made = graph.makers.get(tensor)
            if made is not None and graph.operators[made].name == STACK:
                # A loop adds up whole gradients; shards of them count as gradients.
                size = graph.tensors[tensor].size
                change[made] += size / ways(self._held(tensor).split)
                change[made] -= size / ways(self.strategy.weights[path])
        alive = list(itertools.accumulate(change))
        return int(alive[graph.boundary + 1]), int(max(alive))


def _bandwidths(sizes: Mapping[str, int], machine: Machine) -> dict[str, float]:
    """{axis: bytes per second of its collectives}; slow where it crosses slices."""
    found, left = dict.fromkeys(sizes, machine.link_bandwidth), machine.num_slices
    for axis in SLOW_AXES:
        across = math.gcd(sizes.get(axis, 1), left)
        if across > 1:
            found[axis] = machine.chip.slice_bandwidth
        left //= across
    return found
