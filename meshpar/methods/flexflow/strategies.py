"""Strategies of one mesh: the states of a search, and their costs."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshpar.layouts.layout import Layout
from meshpar.layouts.rules import ACTIVATION_RULES
from meshpar.lowering.memory import Memory
from meshpar.mesh.machine import Machine
from meshpar.methods.flexflow.choices import SPLITTING, Choices, State
from meshpar.methods.flexflow.graph import Graph
from meshpar.methods.flexflow.ledger import Entry, Ledger
from meshpar.methods.flexflow.markov import ILLEGAL
from meshpar.methods.flexflow.simulator import Simulator, StepSeconds, Strategy
from meshpar.methods.flexflow.step_trace import dim_name
from meshpar.methods.flexflow.transfers import Split, Target

_TOO_LARGE = 1e9
"""Seconds that a state costs in a search if it needs just more memory than there is."""

_READ_AND_WRITTEN = 2
"""Times that an update moves parameters and optimizer state."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one state of the search.

    Attributes:
      seconds: of a step.
      memory: of one device.
    """

    seconds: StepSeconds
    memory: Memory


class Strategies:
    """The states of one mesh: costs of the legal ones, None for all others."""

    def __init__(
        self,
        graph: Graph,
        choices: Choices,
        ledger: Ledger,
        machine: Machine,
        compute_dtype: Any,
    ):
        """Prepares the mesh.

        Args:
          graph: of a step.
          choices: of the model on this mesh.
          ledger: of the model on this mesh.
          machine: that trains it.
          compute_dtype: as in `meshpar.lower`.
        """
        self.graph, self.choices, self.ledger = graph, choices, ledger
        self.machine = machine
        zero = choices.required.get("zero")
        layout = Layout(**choices.sizes, zero=zero)
        self.simulator = Simulator(graph, choices.sizes, machine, layout.zero_level)
        self._has_copies = compute_dtype is not None or layout.zero_level < 3
        self._batch = tuple(
            self._used(layout.batch_spec(len(graph.tensors[leaf].shape)))
            for leaf in graph.batch
        )
        self._rules = ACTIVATION_RULES | dict(choices.given("activations"))
        self._given = dict(choices.given("params"))
        self._constraints = {
            index: (self.graph.tensors[op.results[0]].shape, op.target)
            for index, op in enumerate(graph.operators)
            if op.target is not None
        }
        self._costs: dict[State, Cost | None] = {}

    def cost(self, state: State) -> Cost | None:
        """The cost of a state; None if it is no layout."""
        if state not in self._costs:
            self._costs[state] = self._cost(state)
        return self._costs[state]

    def price(self, state: State) -> float:
        """The cost for a search: seconds, or more than any if the memory is short."""
        cost = self.cost(state)
        if cost is None:
            return ILLEGAL
        if self.fits(cost):
            return cost.seconds.total
        return _TOO_LARGE * cost.memory.total / self.machine.memory_bytes

    @property
    def known(self) -> dict[State, Cost]:
        """{state: cost} of all legal states that were asked for."""
        return {state: cost for state, cost in self._costs.items() if cost is not None}

    def fits(self, cost: Cost) -> bool:
        """Whether a device has the memory."""
        return cost.memory.total <= self.machine.memory_bytes

    def _cost(self, state: State) -> Cost | None:
        entries, targets = self._entries(state), self._targets(state)
        if entries is None or targets is None:
            return None
        splits = {path: self._used(entry.spec) for path, entry in entries.items()}
        axes = {a for split in splits.values() for dim in split for a in dim}
        if any(
            size > 1 and axis not in axes and axis in SPLITTING
            for axis, size in self.choices.sizes.items()
        ):
            return None  # A layout refuses an axis that shards nothing.
        sizes = dict.fromkeys(("parameters", "weights", "gradients", "optimizer"), 0)
        for entry in entries.values():
            for kind, size in entry.bytes.items():
                sizes[kind] += size
        sizes["optimizer"] += self.ledger.rest
        moved = _READ_AND_WRITTEN * (sizes["parameters"] + sizes["optimizer"])
        update = (moved + sizes["gradients"]) / self.machine.chip.memory_bandwidth
        done = self.simulator.run(Strategy(splits, self._batch, targets), update)
        if not done.is_held:
            return None
        memory = Memory(
            parameters=sizes["parameters"],
            optimizer=sizes["optimizer"],
            weights=sizes["weights"] if self._has_copies else 0,
            gradients=sizes["gradients"],
            activations=done.activations,
            working=done.peak - done.activations,
        )
        return Cost(done.seconds.slower(self.machine.slowdown), memory)

    def _entries(self, state: State) -> dict[str, Entry] | None:
        """{path: entry} of all parameters, if the layout takes them."""
        names = self.choices.names_of(state)
        rules = self.choices.rules_of(state)[0] | self._given
        entries = {}
        for path in self.graph.params:
            entry = self.ledger.entry(path, names.get(path), rules)
            if entry is None:
                return None
            entries[path] = entry
        return entries

    def _targets(self, state: State) -> dict[int, Target] | None:
        """{operator: what its constraint asks for}, if the model's shapes allow it."""
        rules = self._rules | self.choices.rules_of(state)[1]
        targets = {}
        for index, (shape, dims) in self._constraints.items():
            target = tuple(_axes(names, rules, self.choices.sizes) for names in dims)
            flat = [axis for axes in target for axis in axes or ()]
            ways = (
                math.prod(self.choices.sizes[axis] for axis in axes or ())
                for axes in target
            )
            divides = all(s % n == 0 for s, n in zip(shape, ways, strict=True))
            if len(set(flat)) < len(flat) or not divides:
                return None
            targets[index] = target
        return targets

    def _used(self, spec: Sequence[Sequence[str]]) -> Split:
        """A spec without the axes of size 1."""
        sizes = self.choices.sizes
        return tuple(frozenset(a for a in d if sizes.get(a, 1) > 1) for d in spec)


def _axes(
    names: tuple[str, ...] | None, rules: Mapping[str, Any], sizes: Mapping[str, int]
) -> frozenset[str] | None:
    """Axes in use that a constraint's names, or axes, stand for; None if it is open."""
    if names is None:
        return None
    axes: list[str] = []
    for name in names:
        dim = dim_name(name)
        axes += [name] if dim is None else rules.get(dim) or ()
    return frozenset(axis for axis in axes if sizes.get(axis, 1) > 1)
