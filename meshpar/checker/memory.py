"""Memory of a compiled program at its peak, tensor by tensor.

The text of a program states the order of its instructions. A result is in memory from
its instruction to the last one that reads it; what only hands on a buffer (tuples,
loops, updates in place) needs none of its own. Compilers share buffers in more ways,
so that their own figure may be lower.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from meshpar.checker.facts import Facts, op_name
from meshpar.checker.op_names import module_path
from meshpar.contracts.hlo_text import Instruction, type_bytes

_HANDS_ON = frozenset(
    "tuple while bitcast optimization-barrier conditional copy-done call "
    "dynamic-update-slice".split()
)
_CONSTANTS = ("constant", "iota", "partition-id", "replica-id", "after-all")
_ON_HOST = re.compile(r"\w+\[[^\]]*\]\{[^}]*\bS\(5\)[^}]*\}")
"""An array in the memory of the host."""


class Tensor(NamedTuple):
    """One buffer at the peak.

    Attributes:
      bytes: on one device.
      name: of an argument, or dtype and shape of a result.
      line: "file:line" of the user's code; "" if unknown.
      path: scopes around it.
    """

    bytes: int
    name: str
    line: str = ""
    path: str = ""


class Peak(NamedTuple):
    """The arrays in memory at one time.

    Attributes:
      bytes: of all tensors.
      tensors: the largest first.
    """

    bytes: int
    tensors: tuple[Tensor, ...]


def peak(facts: Facts) -> Peak:
    """The tensors of one device at the peak of a program, its arguments included."""
    held = [
        Tensor(leaf.bytes, leaf.name)
        for leaf in facts.leaves
        if leaf.parameter is not None
    ]
    total, results = _Lives(facts).peak(facts.module.entry)
    made = [
        Tensor(
            size,
            re.sub(r"\{[^}]*\}", "", x.type)[:60],
            facts.line(x),
            module_path(op_name(x)),
        )
        for x, size in results
    ]
    tensors = tuple(sorted([*held, *made], key=lambda t: -t.bytes))
    return Peak(total + sum(t.bytes for t in held), tensors)


def _device_bytes(hlo_type: str) -> int:
    """Bytes of the arrays of a type that are not in the memory of the host."""
    return type_bytes(_ON_HOST.sub("", hlo_type) if "S(5)" in hlo_type else hlo_type)


_Sized = tuple[Instruction, int]
"""An instruction, and the bytes of memory that its result takes."""


def _own_bytes(x: Instruction, scope: Mapping[str, Instruction]) -> int:
    """Bytes that a result takes on the device, beside those of its operands.

    What begins a transfer hands its operands on in its result.
    """
    size = _device_bytes(x.type)
    if x.opcode.endswith("-start") and x.type.startswith("("):
        given = (scope[name].type for name in x.operands if name in scope)
        held = sum(map(_device_bytes, given))
        size -= held if held < size else 0  # An all_reduce has its results alone.
    return size


class _Lives:
    """Lives of the buffers of a program's computations."""

    def __init__(self, facts: Facts):
        self.facts, self.computations = facts, facts.module.computations

    @functools.cache  # noqa: B019  (it lives as long as one call of `peak`)
    def peak(self, computation: str) -> tuple[int, tuple[_Sized, ...]]:
        """(bytes, instructions whose results they are) at a computation's peak."""
        scope = self.computations.get(computation, {})
        schedule = list(scope.values())
        buffers = self._buffers(scope, computation == self.facts.module.entry)
        ends: dict[str, int] = {}
        for index, x in enumerate(schedule):
            for operand in x.operands:
                for buffer in buffers.get(operand, ()):
                    ends[buffer] = index
            for buffer in buffers[x.name]:
                ends[buffer] = index
        for buffer in buffers.get(schedule[-1].name, ()) if schedule else ():
            ends[buffer] = len(schedule)
        ending: dict[int, list[str]] = {}
        for buffer, index in ends.items():
            ending.setdefault(index, []).append(buffer)
        live: dict[str, int] = {}
        total = best = 0
        inside_at, at = (), 0
        for index, x in enumerate(schedule):
            if x.name in ends and x.name in buffers[x.name]:
                live[x.name] = _own_bytes(x, scope)
                total += live[x.name]
            inner, inside = self._inside(x)
            if total + inner > best:
                best, inside_at, at = total + inner, inside, index
            for buffer in ending.get(index, ()):
                total -= live.pop(buffer, 0)
        held = (
            x for i, x in enumerate(schedule[: at + 1]) if ends.get(x.name, -1) >= at
        )
        own = (x for x in held if x.name in buffers[x.name])
        return best, (*((x, _own_bytes(x, scope)) for x in own), *inside_at)

    def _inside(self, x: Instruction) -> tuple[int, tuple[_Sized, ...]]:
        """The peak of what an instruction runs that has buffers of its own."""
        if x.opcode == "while":
            names = re.findall(r"\bbody=%?([\w.\-]+)", x.line)
        else:
            names = x.callees if x.opcode in ("call", "conditional") else []
        return max(map(self.peak, names), key=lambda p: p[0], default=(0, ()))

    def _buffers(
        self, scope: Mapping[str, Instruction], is_entry: bool
    ) -> dict[str, frozenset[str]]:
        """{name: names of the results that own the memory of a value}."""
        found: dict[str, frozenset[str]] = {}
        aliased = set(self._over_arguments(scope)) if is_entry else set()
        for name, x in scope.items():
            operands = [found.get(o, frozenset()) for o in x.operands]
            if x.opcode in ("parameter", *_CONSTANTS) or name in aliased:
                found[name] = frozenset()
            elif x.opcode == "get-tuple-element":
                found[name] = self._element(x, scope, found)
            elif x.opcode in _HANDS_ON or x.opcode.endswith(("-done", "-update")):
                first = x.opcode == "dynamic-update-slice"
                found[name] = frozenset().union(*(operands[:1] if first else operands))
            elif x.opcode == "fusion" and (place := self._updates(x)) is not None:
                found[name] = operands[place]
            else:
                found[name] = (
                    frozenset((name,)) if _own_bytes(x, scope) else frozenset()
                )
        return found

    def _element(
        self,
        x: Instruction,
        scope: Mapping[str, Instruction],
        found: Mapping[str, frozenset[str]],
    ) -> frozenset[str]:
        whole = scope.get(x.operands[0])
        if whole is not None and whole.opcode == "tuple":
            place = int(re.search(r"\bindex=(\d+)", x.line).group(1))
            return found.get(whole.operands[place], frozenset())
        return found.get(x.operands[0], frozenset())

    def _updates(self, fusion: Instruction) -> int | None:
        """The operand that a fusion updates in place; None if it makes a new array."""
        body = fusion.callees[0]
        root = self.facts.flow.root(body)
        while root is not None and root.opcode in ("bitcast", "convert", "copy"):
            root = self.computations[body].get(root.operands[0])
        if root is None or root.opcode != "dynamic-update-slice":
            return None
        target = self.computations[body].get(root.operands[0])
        while target is not None and target.opcode in ("bitcast", "convert", "copy"):
            target = self.computations[body].get(target.operands[0])
        if target is None or target.opcode != "parameter":
            return None
        return int(re.search(r"parameter\((\d+)\)", target.line).group(1))

    def _over_arguments(self, scope: Mapping[str, Instruction]) -> Iterator[str]:
        """Names of the results that are written over donated arguments."""
        root = self.facts.flow.root(self.facts.module.entry)
        if root is None or root.opcode != "tuple":
            return
        for place in self.facts.written_over:
            if place < len(root.operands):
                yield root.operands[place]
