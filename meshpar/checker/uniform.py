"""Values of a compiled program that are the same on all devices along a mesh axis.

A value is equal along an axis if it is computed from equal values alone. Arguments are
unless the axis splits them, and so are the results of collectives that sum or gather
over the axis.
"""

import functools
import re
from collections.abc import Mapping, Sequence

from meshpar.contracts.hlo import HloModule, fragment_of, is_collective
from meshpar.contracts.hlo_groups import groups_of
from meshpar.contracts.hlo_text import Instruction

Axes = frozenset[str]
Known = Axes | tuple
"""The axes along which a value is equal; a tuple of them for a tuple."""

_DIFFERENT = ("partition-id", "replica-id", "rng", "infeed", "recv", "custom-call")
_SPREADS = ("reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_ROUNDS = 8
_NUMBER = re.compile(r"parameter\((\d+)\)")
_INDEX = re.compile(r"\bindex=(\d+)")


class Uniform:
    """The axes along which the values of a program are equal.

    Attributes:
      of: {computation: {name: axes}} of all computations that run.
    """

    def __init__(self, program: HloModule, split: Sequence[Axes]):
        """Follows the values of a program.

        Args:
          program: the program.
          split: the axes that split each of its arguments.
        """
        self.program = program
        self.all = frozenset(axis for axis, size in program.mesh.items() if size > 1)
        self.of: dict[str, dict[str, Known]] = {}
        self._results: dict[tuple, Known] = {}
        self._run(program.entry, [self.all - axes for axes in split])

    def along(self, computation: str, names: Sequence[str]) -> Axes:
        """The axes along which all these values are equal."""
        known = self.of.get(computation, {})
        return self._all_of([known.get(name, frozenset()) for name in names])

    def _all_of(self, values: Sequence[Known]) -> Axes:
        axes = self.all
        for value in values:
            axes &= self._all_of(value) if isinstance(value, tuple) else value
        return axes

    def _run(self, computation: str, arguments: Sequence[Known]) -> Known:
        """The axes of a computation's result."""
        key = computation, tuple(arguments)
        if key in self._results:
            return self._results[key]
        known: dict[str, Known] = {}
        result: Known = frozenset()
        for name, x in self.program.computations[computation].items():
            known[name] = self._instruction(x, computation, known, arguments)
            if x.line.startswith("ROOT"):
                result = known[name]
        self.of[computation] = known
        self._results[key] = result
        return result

    def _instruction(
        self,
        x: Instruction,
        scope: str,
        known: Mapping[str, Known],
        arguments: Sequence[Known],
    ) -> Known:
        operands = [known.get(name, self.all) for name in x.operands]
        opcode = x.opcode
        if opcode == "parameter":
            number = int(_NUMBER.search(x.line).group(1))
            return arguments[number] if number < len(arguments) else frozenset()
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            place = int(_INDEX.search(x.line).group(1))
            whole = operands[0]
            inside = isinstance(whole, tuple) and place < len(whole)
            return whole[place] if inside else self._all_of([whole])
        if opcode in ("copy", "optimization-barrier"):
            return operands[0]
        if opcode == "while":
            return self._loop(x, operands[0])
        if opcode in ("fusion", "call", "async-start") and len(x.callees) == 1:
            return self._run(x.callees[0], operands)
        axes = self._all_of(operands)
        if fragment := fragment_of(x, self.program.computations[scope]):
            begun = known[fragment.name]
            # What begins a transfer hands the operand on beside the result.
            given = known.get(fragment.operands[0], frozenset())
            rest = (self.all,) * x.type.count("[")
            return (given, begun, *rest) if x.type.startswith("(") else begun
        if is_collective(x):
            over = frozenset(self._over(x.line))
            spreads = x.opcode.removesuffix("-start") in _SPREADS
            return axes - over if spreads else axes | over
        return frozenset() if opcode.startswith(_DIFFERENT) else axes

    @functools.cache  # noqa: B019
    def _over(self, line: str) -> tuple[str, ...]:
        groups = groups_of(line, self.program.mesh)
        return () if groups.partial else groups.axes

    def _loop(self, loop: Instruction, start: Known) -> Known:
        """A loop's values: those that start equal, and stay so in every round."""
        body = re.search(r"\bbody=%?([\w.\-]+)", loop.line).group(1)
        for _ in range(_ROUNDS):
            after = self._run(body, [start])
            both = _meet(start, after)
            if both == start:
                return start
            start = both
        return frozenset()


def _meet(one: Known, other: Known) -> Known:
    """The axes that both have."""
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return tuple(map(_meet, one, other))
    if isinstance(one, tuple) or isinstance(other, tuple):
        return frozenset()
    return one & other
