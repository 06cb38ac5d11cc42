"""Flow of values through a compiled program: where one comes from, and who reads it.

Values are followed through copies, casts and reshapes, into and out of fusions, from
the start of an asynchronous collective to its end, and from the body of a loop to what
the loop starts with.
"""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshpar.contracts.hlo import HloModule, fragment_of
from meshpar.contracts.hlo_text import Instruction

CASTS = frozenset(
    "bitcast bitcast-convert convert copy copy-start copy-done transpose reshape "
    "optimization-barrier".split()
)
"""Opcodes whose result has the numbers of their operand."""

_RETURNS = frozenset(("fusion", "call", "async-start"))
"""Opcodes whose result is that of the computation that they run."""

_BY_POSITION = frozenset(("partition-id", "replica-id"))
_NUMBER = re.compile(r"parameter\((\d+)\)")
_INDEX = re.compile(r"\bindex=(\d+)")


class Value(NamedTuple):
    """The result of an instruction.

    Attributes:
      computation: name of the computation that contains it.
      name: of the instruction.
    """

    computation: str
    name: str


class Caller(NamedTuple):
    """The instruction that runs a computation, and its own computation."""

    computation: str
    instruction: Instruction


class Flow:
    """The flow of values through one program."""

    def __init__(self, module: HloModule):
        self.module = module

    def instruction(self, value: Value) -> Instruction:
        """The instruction of a value."""
        return self.module.computations[value.computation][value.name]

    @functools.cached_property
    def callers(self) -> dict[str, Caller]:
        """{computation: what runs it}; of several the last one."""
        found = {}
        for name, scope in self.module.computations.items():
            for x in scope.values():
                if "=%" in x.line or "={%" in x.line:
                    for callee in _run_by(x):
                        found[callee] = Caller(name, x)
        return found

    @functools.cache  # noqa: B019
    def users(self, computation: str) -> dict[str, list[Instruction]]:
        """{name: the instructions that read it} of one computation."""
        found: dict[str, list[Instruction]] = {}
        for x in self.module.computations[computation].values():
            for operand in dict.fromkeys(x.operands):
                found.setdefault(operand, []).append(x)
        return found

    @functools.cache  # noqa: B019
    def root(self, computation: str) -> Instruction | None:
        """The result of a computation."""
        scope = self.module.computations.get(computation, {})
        return next((x for x in scope.values() if x.line.startswith("ROOT")), None)

    def origin(self, value: Value) -> Value:
        """The value of which another one is a copy, a cast or a reshape."""
        seen = set()
        while value not in seen and value.name in self.module.computations.get(
            value.computation, {}
        ):
            seen.add(value)
            following = self._before(value, self.instruction(value))
            if following is None:
                return value
            value = following
        return value

    def _before(self, value: Value, x: Instruction) -> Value | None:
        """The value that an instruction hands on; None if it makes a new one."""
        here = value.computation
        if (x.opcode in CASTS or _waits(x)) and x.operands:
            return Value(here, x.operands[0])
        if fragment := fragment_of(x, self.module.computations[here]):
            return Value(here, fragment.name)
        if x.opcode == "parameter":
            return self._argument(here, int(_NUMBER.search(x.line).group(1)))
        if x.opcode == "get-tuple-element":
            return self._element(
                Value(here, x.operands[0]), int(_INDEX.search(x.line).group(1))
            )
        if x.opcode == "fusion" and (result := self.root(x.callees[0])):
            inside = self.origin(Value(x.callees[0], result.name))
            # The origin leaves the fusion if this only hands on an operand.
            return inside if inside.computation != x.callees[0] else None
        return None

    def _argument(self, computation: str, number: int) -> Value | None:
        """The operand for a parameter of a fusion or a call."""
        caller = self.callers.get(computation)
        if caller is None or caller.instruction.opcode in ("while", "conditional"):
            return None
        operands = caller.instruction.operands
        if number >= len(operands):
            return None
        return Value(caller.computation, operands[number])

    def _element(self, whole: Value, index: int) -> Value | None:
        """The value that stands at a place of a tuple."""
        x = self.module.computations[whole.computation].get(whole.name)
        while x is not None and x.opcode in ("copy", "optimization-barrier"):
            whole = Value(whole.computation, x.operands[0])
            x = self.module.computations[whole.computation].get(whole.name)
        if x is None:
            return None
        if x.opcode == "tuple":
            return Value(whole.computation, x.operands[index])
        if x.opcode == "parameter":
            caller = self.callers.get(whole.computation)
            if caller is None or caller.instruction.opcode != "while":
                return None
            if index not in self.unchanged(whole.computation):
                return None
            outside = Value(caller.computation, caller.instruction.operands[0])
            return self._element(outside, index)
        if x.opcode == "while":
            # What a loop does not change comes out as it went in.
            body = _body(x)
            if index in self.unchanged(body):
                return self._element(Value(whole.computation, x.operands[0]), index)
        return None

    @functools.cache  # noqa: B019
    def unchanged(self, body: str) -> frozenset[int]:
        """Places of a loop's tuple that its body hands on as they are."""
        root, scope = self.root(body), self.module.computations.get(body, {})
        if root is None or root.opcode != "tuple":
            return frozenset()
        found = set()
        for place, name in enumerate(root.operands):
            x = scope.get(name)
            while x is not None and x.opcode == "copy":
                x = scope.get(x.operands[0])
            if x is not None and x.opcode == "get-tuple-element":
                source = scope.get(x.operands[0])
                same = int(_INDEX.search(x.line).group(1)) == place
                if same and source is not None and source.opcode == "parameter":
                    found.add(place)
        return frozenset(found)

    def loop_of(self, computation: str) -> str | None:
        """The body of the innermost loop around a computation; None outside of any."""
        while (caller := self.callers.get(computation)) is not None:
            if caller.instruction.opcode == "while":
                return computation
            computation = caller.computation
        return None

    @functools.cache  # noqa: B019
    def constant_in_loop(self, body: str) -> frozenset[str]:
        """Names of the values of a loop's body that are the same in every round."""
        same: set[str] = set()
        unchanged = self.unchanged(body)
        for name, x in self.module.computations[body].items():
            if x.opcode == "parameter":
                continue
            if x.opcode == "get-tuple-element":
                source = self.module.computations[body].get(x.operands[0])
                if source is not None and source.opcode == "parameter":
                    if int(_INDEX.search(x.line).group(1)) in unchanged:
                        same.add(name)
                    continue
            if all(operand in same for operand in x.operands):
                if not x.opcode.startswith(("rng", "custom-call", "infeed", "recv")):
                    same.add(name)
        return frozenset(same)

    def readers(self, value: Value) -> Iterator[Value]:
        """The values that are made of another one, casts and copies left out."""
        waiting, seen = [value], {value}

        def follow(next_value: Value) -> None:
            if next_value not in seen:
                seen.add(next_value)
                waiting.append(next_value)

        while waiting:
            at = waiting.pop()
            if around := self._around(at):
                follow(around)
            scope = self.module.computations[at.computation]
            for x in self.users(at.computation).get(at.name, ()):
                made = Value(at.computation, x.name)
                if fragment := fragment_of(x, scope):
                    if fragment.name == at.name:
                        follow(made)
                elif x.opcode == "fusion":
                    body = x.callees[0]
                    for place, operand in enumerate(x.operands):
                        if operand == at.name and (p := self._parameter(body, place)):
                            follow(Value(body, p))
                elif x.opcode in CASTS or x.opcode == "get-tuple-element" or _waits(x):
                    follow(made)
                elif x.opcode == "tuple":
                    for place, operand in enumerate(x.operands):
                        if operand == at.name:
                            for element in self.elements(made, place):
                                follow(element)
                else:
                    yield made

    def elements(self, whole: Value, place: int) -> Iterator[Value]:
        """The values that are read from a place of a tuple."""
        for x in self.users(whole.computation).get(whole.name, ()):
            if x.opcode == "get-tuple-element":
                if int(_INDEX.search(x.line).group(1)) == place:
                    yield Value(whole.computation, x.name)
        if around := self._around(whole):
            yield from self.elements(around, place)

    def _around(self, value: Value) -> Value | None:
        """The fusion, call or start of a pair whose result a value is."""
        caller = self.callers.get(value.computation)
        if caller is None or caller.instruction.opcode not in _RETURNS:
            return None
        root = self.root(value.computation)
        if root is None or root.name != value.name:
            return None
        return Value(caller.computation, caller.instruction.name)

    def _parameter(self, computation: str, number: int) -> str | None:
        """Name of a parameter of a computation."""
        for x in self.module.computations[computation].values():
            if x.opcode == "parameter" and f"parameter({number})" in x.line:
                return x.name
        return None

    def depends_on_position(self, value: Value) -> bool:
        """Whether a value is computed from the number of the device."""
        waiting, seen = [value], set()
        while waiting:
            at = waiting.pop()
            scope = self.module.computations.get(at.computation, {})
            if at in seen or at.name not in scope or len(seen) > 200:
                continue
            seen.add(at)
            x = scope[at.name]
            if x.opcode in _BY_POSITION:
                return True
            if x.opcode == "parameter":
                number = int(_NUMBER.search(x.line).group(1))
                outside = self._argument(at.computation, number)
                waiting += [outside] if outside else []
            else:
                waiting += [Value(at.computation, o) for o in x.operands]
                for callee in x.callees if x.opcode == "fusion" else ():
                    if result := self.root(callee):
                        waiting.append(Value(callee, result.name))
        return False


def _waits(x: Instruction) -> bool:
    """Whether an instruction waits for what its operand has begun."""
    return x.opcode.endswith(("-done", "-update"))


def _body(loop: Instruction) -> str:
    return re.search(r"\bbody=%?([\w.\-]+)", loop.line).group(1)


def _run_by(x: Instruction) -> Sequence[str]:
    if x.opcode == "while":
        return re.findall(r"\b(?:body|condition)=%?([\w.\-]+)", x.line)
    return x.callees
