"""Facts of a compiled step: what it moves, what it is given, what it holds.

They are read from the text of the compiled program, by the readers that meshpar's own
contracts use. Rules look at them, and at nothing else.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshpar.checker import op_names
from meshpar.checker.flow import Flow, Value
from meshpar.checker.leaves import Leaf
from meshpar.checker.uniform import Uniform
from meshpar.compat import users_own
from meshpar.contracts.collective import Collective
from meshpar.contracts.hlo import Call, HloModule, Occurrence
from meshpar.contracts.hlo_text import Instruction, source_stacks
from meshpar.jaxprs.walk import equations
from meshpar.mesh.platform import Platform

_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_FAR = 6
"""Operations back from a collective without a line, at most, to one that has a line."""

_KEY = re.compile(r"\[[^\]]*\]|\.\w+")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Move:
    """One collective of the compiled program, and where the step asks for it.

    Attributes:
      collective: kind, axes, bytes and runs.
      value: its instruction in the program; of fragments the first.
      result: the last fragment, with the result; `value` if it is whole.
      instruction: the line of `value`.
      line: "file:line" of the user's code; "" if the compiler gives none.
      path: scopes around it, such as "Model/blocks_0/mlp".
      phase: forward, backward or update.
      written: whether the code writes it, inside shard_map; else the compiler does.
    """

    collective: Collective
    value: Value
    result: Value
    instruction: Instruction
    line: str
    path: str
    phase: str
    written: bool

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends per step."""
        return self.collective.wire_bytes

    @property
    def kind(self) -> str:
        """all_reduce, all_gather, reduce_scatter, all_to_all, permute, broadcast."""
        return self.collective.kind

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes over which it runs."""
        return self.collective.axes

    @functools.cached_property
    def arrays(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Pairs of (dtype, shape) of its results on one device."""
        return arrays_of(self.instruction.type)


def arrays_of(hlo_type: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Pairs of (dtype, shape) of the arrays of an HLO type."""
    return tuple(
        (dtype, tuple(int(d) for d in dims.split(",") if d))
        for dtype, dims in _ARRAY.findall(hlo_type)
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
    """The facts of one compiled step.

    Attributes:
      module: the text of the compiled program, read.
      mesh: {axis: size}, outer to inner.
      platform: of the devices that it is compiled for.
      leaves: the arguments, in order.
      results: the results, in order; without names in text alone.
      jaxpr: of the step; None where only a compiled program is given.
      peak_bytes: memory of one device at the peak, as the compiler says; None in text.
      written_over: numbers of the results that are written over arguments.
      stacks: {stack frame id: its "file:line"s, innermost first}.
    """

    module: HloModule
    mesh: Mapping[str, int]
    platform: Platform
    leaves: tuple[Leaf, ...]
    results: tuple[Leaf, ...] = ()
    jaxpr: Any = None
    peak_bytes: int | None = None
    written_over: frozenset[int] = frozenset()
    stacks: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, text: str, mesh: Mapping[str, int], **more: Any) -> "Facts":
        """The facts of a program's text.

        Args:
          text: `jax.stages.Compiled.as_text()`.
          mesh: {axis: size}, outer to inner.
          **more: the other attributes.
        """
        module = HloModule(text, mesh, unknown_rounds=1)
        return cls(module=module, mesh=mesh, stacks=source_stacks(text), **more)

    @functools.cached_property
    def flow(self) -> Flow:
        """The flow of values through the program."""
        return Flow(self.module)

    @functools.cached_property
    def moves(self) -> tuple[Move, ...]:
        """The collectives that move something, in the order of the program."""
        program = self.module
        chains = program.chains(Call(program.entry))
        return tuple(self._move(fragments) for fragments in chains)

    def _move(self, fragments: Sequence[Occurrence]) -> Move:
        collective, last = self.module.merged(fragments), fragments[-1].collective
        value = Value(collective.computation, collective.name)
        instruction = self.flow.instruction(value)
        result = Value(last.computation, last.name)
        named = self._named(value, result)
        name = op_name(named)
        return Move(
            collective,
            value,
            result,
            instruction,
            self.line(named),
            op_names.module_path(name),
            op_names.phase(name, self.has_backward),
            "shard_map" in name,
        )

    def _named(self, value: Value, result: Value) -> Instruction:
        """The instruction of a collective; one beside it if it has no line.

        Gathers of weights may have none: then what reads them tells what they are for.
        """
        own = self.flow.instruction(value)
        if _FRAME.search(own.line):
            return own
        for reader in self.flow.readers(result):
            x = self.flow.instruction(reader)
            if _FRAME.search(x.line) and "(" in op_name(x):
                return x
        x, at = own, value
        for _ in range(_FAR):
            if not x.operands:
                break
            at = self.flow.origin(Value(at.computation, x.operands[0]))
            x = self.module.computations[at.computation].get(at.name, own)
            if _FRAME.search(x.line) and "(" in op_name(x):
                return x
        return own

    @functools.cached_property
    def has_backward(self) -> bool:
        """Whether any operation of the program belongs to a backward pass."""
        return any(
            "/transpose(" in x.line  # In its name; transpose( alone is an opcode.
            for scope in self.module.computations.values()
            for x in scope.values()
        )

    def line(self, instruction: Instruction) -> str:
        """The "file:line" of the user's code for an instruction; "" if unknown."""
        at = instruction.line.rfind("stack_frame_id=")
        frame = _FRAME.match(instruction.line, at) if at >= 0 else None
        return self._lines.get(frame.group(1), "") if frame else ""

    def line_of_part(self, move: Move, place: int) -> str:
        """The line of one of the collectives that a compiler has put together.

        Args:
          move: all of them.
          place: which of the operands it moves.
        """
        parts = self.flow.elements(move.value, place)
        found = (self.line(self.flow.instruction(part)) for part in parts)
        return next(filter(None, found), move.line)

    @functools.cached_property
    def _lines(self) -> dict[str, str]:
        return {frame: users_own(stack) for frame, stack in self.stacks.items()}

    @functools.cache  # noqa: B019  (facts live as long as a check)
    def runs(self, computation: str) -> int:
        """How often a computation runs per step; 0 if it never does."""
        if computation == self.module.entry:
            return 1
        if (caller := self.flow.callers.get(computation)) is None:
            return 0
        x = caller.instruction
        rounds = self.module.rounds(x) if x.opcode == "while" else 1
        return rounds * self.runs(caller.computation)

    @functools.cached_property
    def wire_bytes(self) -> float:
        """Bytes that one device sends per step."""
        return sum(move.wire_bytes for move in self.moves)

    @functools.cached_property
    def memory_bytes(self) -> int:
        """Memory of one device at the peak; of the arguments where it is not known."""
        return self.peak_bytes or sum(leaf.bytes for leaf in self.leaves)

    @functools.cached_property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh.values())

    @functools.cached_property
    def equations(self) -> tuple[Any, ...]:
        """The equations of the step, those inside of others included."""
        return tuple(equations(self.jaxpr)) if self.jaxpr is not None else ()

    @functools.cached_property
    def returned(self) -> tuple[tuple[Leaf, Leaf], ...]:
        """Pairs of (argument, the result that is its next value).

        An argument counts as a whole, such as a train state with all that is in it, if
        the step returns the same tree.
        """
        pairs: list[tuple[Leaf, Leaf]] = []
        trees = dict(_trees(self.results))
        for group in dict.fromkeys(leaf.group for leaf in self.leaves):
            own = {x.rest: x for x in self.leaves if x.group == group}
            for name, tree in trees.items():
                same = own.keys() == tree.keys()
                if same and (len(own) > 1 or _may_follow(own[""], tree[""])):
                    pairs += [(leaf, tree[rest]) for rest, leaf in own.items()]
                    del trees[name]
                    break
        return tuple(pairs)

    @functools.cached_property
    def state(self) -> tuple[Leaf, ...]:
        """The arguments that the step returns anew: parameters, optimizer state."""
        if not self.results:  # Text does not name the results.
            groups = {leaf.group for leaf in self.leaves if leaf.aliased}
            return tuple(leaf for leaf in self.leaves if leaf.group in groups)
        return tuple(leaf for leaf, _ in self.returned)

    @functools.cached_property
    def batch(self) -> tuple[Leaf, ...]:
        """The arguments that are no state."""
        state = set(map(id, self.state))
        return tuple(leaf for leaf in self.leaves if id(leaf) not in state)

    @functools.cached_property
    def batch_axes(self) -> frozenset[str]:
        """Mesh axes that split the first dim of some argument that is no state."""
        return frozenset(
            axis for leaf in self.batch if leaf.dims for axis in leaf.dims[0]
        )

    @functools.cached_property
    def uniform(self) -> Uniform:
        """The axes along which values of the program are equal."""
        split = {x.parameter: x.axes for x in self.leaves if x.dims is not None}
        every = frozenset(self.mesh)
        numbers = range(len(self.leaves))
        return Uniform(self.module, [split.get(n, every) for n in numbers])

    def argument_sliced(self, value: Value) -> Leaf | None:
        """The argument that a value is or, as one layer of a stack, a part of."""
        while True:
            value = self.flow.origin(value)
            scope = self.module.computations.get(value.computation, {})
            x = scope.get(value.name)
            if x is None or x.opcode not in ("dynamic-slice", "fusion"):
                return self.argument(value)
            if x.opcode == "fusion":
                root = self.flow.root(x.callees[0])
                inside = Value(x.callees[0], root.name)
                inside = self.flow.origin(inside)
                x = self.flow.instruction(inside)
                if x.opcode != "dynamic-slice":
                    return None
                value = inside
            value = Value(value.computation, x.operands[0])

    def argument(self, value: Value) -> Leaf | None:
        """The argument of the step of which a value is a copy, cast or reshape."""
        origin = self.flow.origin(value)
        if origin.computation != self.module.entry:
            return None
        instruction = self.flow.instruction(origin)
        if instruction.opcode != "parameter":
            return None
        number = int(re.search(r"parameter\((\d+)\)", instruction.line).group(1))
        return next((x for x in self.leaves if x.parameter == number), None)


def _may_follow(leaf: Leaf, result: Leaf) -> bool:
    """Whether a result may be the next value of a single array; a key stays a key."""
    kinds = {x.dtype.startswith("key<") for x in (leaf, result)}
    return leaf.shape == result.shape and len(kinds) == 1


def _trees(results: Sequence[Leaf]) -> Iterator[tuple[str, dict[str, Leaf]]]:
    """Pairs of (name, {path inside: leaf}) of the trees among results, outer first."""
    for depth in range(3):
        trees: dict[str, dict[str, Leaf]] = {}
        for leaf in results:
            keys = _KEY.findall(leaf.rest)
            name = "".join(keys[:depth])
            trees.setdefault(name, {})["".join(keys[depth:])] = leaf
        yield from trees.items()


def op_name(instruction: Instruction) -> str:
    """The name that jax gave an operation."""
    match = _OP_NAME.search(instruction.line)
    return match.group(1).replace("\\'", "'") if match else ""
