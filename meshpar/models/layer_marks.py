"""One trace of a loss function, in which each call of a layer is one equation: a mark.

A mark holds how the layer is called and the types of what it returns; the layer itself
does not run. Calls inside `jax.jit` or `jax.checkpoint` are written out. Where
`flax.linen.scan` stacks the layers, its scan stands for one call in each round.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core
from jax.interpreters import ad, batching

from meshpar import compat
from meshpar.arrays import Array
from meshpar.errors import MeshparError
from meshpar.jaxprs.straight_line import (
    Atom,
    Slot,
    Step,
    StraightLine,
    dependents,
    needed,
    slots_of,
)
from meshpar.jaxprs.walk import equations, inner_jaxprs
from meshpar.models.layer_call import Configuration

_NAME = "meshpar_layer"
_WRITTEN_OUT = frozenset(("jit", "pjit", "closed_call", "core_call"))
_WRITTEN_OUT |= {"remat", "remat2", "checkpoint"}


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """How a loss function calls a layer.

    Attributes:
      layer: the layer, for errors.
      number: its number.
      configuration: what it is beside its arrays.
      tree: structure of (args, kwargs).
      flags: {number of a leaf: value} of the arguments that are no arrays.
      avals: types of the arrays that it returns.
      num_first: number of leaves of its first positional argument.
    """

    layer: str
    number: int
    configuration: Configuration
    tree: Any
    flags: dict[int, Any]
    avals: tuple[Any, ...]
    num_first: int

    @property
    def array_numbers(self) -> tuple[int, ...]:
        """Numbers of the leaves that are arrays."""
        return tuple(i for i in range(self.tree.num_leaves) if i not in self.flags)


class Marked(NamedTuple):
    """A call of a layer in a program.

    Attributes:
      call: how the layer is called.
      operands: its arrays, in the order of `Call.array_numbers`.
      results: the arrays that it returns.
    """

    call: Call
    operands: tuple[Atom, ...]
    results: tuple[Slot, ...]


class MarkedProgram(NamedTuple):
    """A loss function without its layers.

    Attributes:
      program: its steps, without those of layers.
      calls: the calls of layers, in order.
      stacked: {slot: slots of its rows} of what scans over layers return.
    """

    program: StraightLine
    calls: tuple[Marked, ...]
    stacked: dict[Slot, tuple[Slot, ...]]


_mark_p = core.Primitive(_NAME)
_mark_p.multiple_results = True


def mark(call: Call, arrays: Sequence[Array]) -> list[Array]:
    """Stands for the call of a layer; returns what it returns."""
    return _mark_p.bind(*arrays, call=call)


def _transformed(call: Call) -> MeshparError:
    return MeshparError(
        f"the model calls {call.layer} inside a transformation of jax (grad, vmap, "
        "scan, cond, custom_vjp), and meshpar runs layers outside of it; take the "
        "transformation away, or leave layers out (layers='')"
    )


def _refuse(call: Call) -> Any:
    raise _transformed(call)


_mark_p.def_abstract_eval(lambda *_, call: list(call.avals))
ad.primitive_jvps[_mark_p] = lambda primals, tangents, call: _refuse(call)
batching.primitive_batchers[_mark_p] = lambda args, dims, call: _refuse(call)


def marked_program(closed: Any, is_scanned: bool) -> MarkedProgram:
    """Reads the calls of layers from the jaxpr of a loss function.

    Args:
      closed: the jaxpr.
      is_scanned: whether a scan over a layer runs another layer in each round, as
        `flax.linen.scan` does; else it runs one layer again and again.

    Raises:
      MeshparError: a layer is called inside a transformation.
    """
    whole = StraightLine.of(closed, _holds_mark)
    reader = _Reader(dict(whole.constants), is_scanned)
    for step in whole.steps:
        reader.add(step)
    program = StraightLine(
        whole.inputs,
        reader.constants,
        tuple(reader.steps),
        tuple(map(reader.read, whole.outputs)),
    )
    return MarkedProgram(program, tuple(reader.calls), reader.stacked)


def _marks_inside(eqn: Any) -> list[Call]:
    """The calls of layers in the jaxprs that an equation runs."""
    return [
        inner.params["call"]
        for body in inner_jaxprs(eqn)
        for inner in equations(body)
        if inner.primitive.name == _NAME
    ]


def _holds_mark(eqn: Any) -> bool:
    return eqn.primitive.name in _WRITTEN_OUT and bool(_marks_inside(eqn))


class _Reader:
    """Sorts the steps of a program into calls of layers and others.

    Attributes:
      constants: {slot: array}.
      steps: those that are no calls of layers.
      calls: the calls of layers.
      stacked: as in `MarkedProgram`.
    """

    def __init__(self, constants: dict[Slot, Any], is_scanned: bool) -> None:
        self.constants, self._is_scanned = constants, is_scanned
        self.steps: list[Step] = []
        self.calls: list[Marked] = []
        self.stacked: dict[Slot, tuple[Slot, ...]] = {}
        self._renamed: dict[Slot, Atom] = {}

    def read(self, atom: Atom) -> Atom:
        """The value that stands for another."""
        return self._renamed.get(atom, atom) if isinstance(atom, Slot) else atom

    def add(self, step: Step) -> None:
        """Adds a step.

        Raises:
          MeshparError: it transforms a layer.
        """
        step = step._replace(operands=tuple(map(self.read, step.operands)))
        if step.eqn.primitive.name == _NAME:
            call = step.eqn.params["call"]
            self.calls.append(Marked(call, step.operands, step.results))
        elif not (inner := _marks_inside(step.eqn)):
            self.steps.append(step)
        elif self._is_scanned and step.eqn.primitive.name == "scan":
            self._add_scan(step, inner[0])
        else:
            raise _transformed(inner[0])

    def _add_scan(self, step: Step, call: Call) -> None:
        """Adds a call for each round of a scan, as `flax.linen.scan` writes it.

        Raises:
          MeshparError: its body is more than the call of one layer.
        """
        params, (num_consts, num_carry) = step.eqn.params, compat.scan_counts(step.eqn)
        body = StraightLine.of(params["jaxpr"], _holds_mark)
        self.constants.update(body.constants)
        carry, each = body.inputs[num_consts:][:num_carry], body.inputs[num_consts:]
        found = [s for s in body.steps if s.eqn.primitive.name == _NAME]
        if len(found) != 1 or params["reverse"]:
            raise _transformed(call)
        (marked,) = found
        before = needed(body.steps, marked.operands)
        of_round = dependents(body.steps, each[num_carry:])
        computed = dependents(body.steps, carry).difference(carry)
        if not of_round.isdisjoint(slots_of(marked.operands)):
            raise MeshparError(
                f"{call.layer} is called by a scan that gives each layer inputs of its "
                "own (in_axes); make them parameters or attributes of the layer, or "
                "give all layers the same (in_axes=nn.broadcast)"
            )
        if any(not computed.isdisjoint(s.results) for s in before):
            raise _transformed(call)
        values = dict(zip(body.inputs, step.operands, strict=True))
        self._copy(before, values)  # It is the same in all rounds.
        results: list[tuple[Slot, ...]] = []
        for number in range(params["length"]):
            operands = tuple(_of(values, atom) for atom in marked.operands)
            results.append(tuple(Slot(slot.aval) for slot in marked.results))
            own = dataclasses.replace(call, number=call.number + number)
            self.calls.append(Marked(own, operands, results[-1]))
            values.update(zip(marked.results, results[-1], strict=True))
            after = [_of(values, atom) for atom in body.outputs[:num_carry]]
            values.update(zip(carry, after, strict=True))
        self._renamed.update(zip(step.results[:num_carry], after, strict=True))
        rows = dict(zip(marked.results, zip(*results, strict=True), strict=True))
        pairs = zip(step.results, body.outputs, strict=True)
        for slot, atom in list(pairs)[num_carry:]:
            if isinstance(atom, Slot) and atom in rows:
                self.stacked[slot] = rows[atom]

    def _copy(self, steps: Sequence[Step], values: dict[Slot, Atom]) -> None:
        """Adds the steps of another program, whose inputs have the given values."""
        for step in steps:
            operands = tuple(_of(values, atom) for atom in step.operands)
            results = tuple(Slot(slot.aval) for slot in step.results)
            self.steps.append(Step(step.eqn, operands, results))
            values.update(zip(step.results, results, strict=True))


def _of(values: dict[Slot, Atom], atom: Atom) -> Atom:
    return values.get(atom, atom) if isinstance(atom, Slot) else atom
