"""The parts of a loss function whose calls of layers are marked."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar import compat
from meshpar.arrays import Array, num_bytes
from meshpar.errors import MeshparError
from meshpar.jaxprs.straight_line import (
    Atom,
    Slot,
    StraightLine,
    dependents,
    needed,
    slots_of,
    value_numbers,
)
from meshpar.metrics import LossResult
from meshpar.models.layer_call import Column, LayerCall, Source, describe
from meshpar.models.layer_marks import Marked, MarkedProgram
from meshpar.models.layer_reads import Layers, Place, Reads, check_inputs

_MARKS_AS_VARYING = ("pvary", "pcast")
"""Primitives that give a parameter the type of what it meets."""


@dataclasses.dataclass(frozen=True)
class Named:
    """The layers of a model, as its user named them.

    Attributes:
      layers: how they are named.
      num_layers: number of layers.
      period: number of columns.
    """

    layers: str
    num_layers: int
    period: int

    def name(self, number: int) -> str:
        """A layer, for errors."""
        return f"layer {number} of {self.layers!r}"


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """The parts of a model that run before, in and after the layers.

    Attributes:
      program: the loss function without its layers.
      inputs: its inputs, but for the parameters of layers.
      chain: the calls of the layers.
      columns: the layers of the first row.
      places: {slot: where the head finds it}, of what the loss reads of other layers.
      stacked: {slot: slots of its rows}, of what scans over layers return.
      outputs: results of the loss function.
      result: their structure.
    """

    program: StraightLine
    inputs: tuple[Slot, ...]
    chain: "_Chain"
    columns: tuple[Column, ...]
    places: Mapping[Slot, Place]
    stacked: Mapping[Slot, tuple[Slot, ...]]
    outputs: tuple[Atom, ...]
    result: Any

    @classmethod
    def of(
        cls,
        named: Named,
        marked: MarkedProgram,
        paths: Sequence[tuple[int | None, str]],
        num_shared: int,
        result: Any,
    ) -> "Parts":
        """Cuts a program.

        Args:
          named: the layers.
          marked: the program; its inputs are the layers' parameters, the shared ones,
            the batch and the key.
          paths: (number of the layer, path within it) of the layers' parameters; None
            as number of what holds those of all layers.
          num_shared: number of shared parameters.
          result: structure of the loss function's result.

        Raises:
          MeshparError: the layers are not called one after the other.
          MeshparError: the loss reads what they cannot hand on.
        """
        program, outputs = marked.program, marked.program.outputs[: result.num_leaves]
        inputs = program.inputs[len(paths) :]
        chain = _Chain.of(named, marked, inputs[:num_shared])
        parameters = dict(zip(program.inputs, paths, strict=False))
        for step in program.steps:
            if step.eqn.primitive.name in _MARKS_AS_VARYING:
                for slot in slots_of(step.operands):
                    if slot in parameters:
                        parameters[step.results[0]] = parameters[slot]
        names = [named.name(number) for number in range(named.num_layers)]
        _check_known(named, marked, (*chain.arguments, *outputs))
        check_inputs(marked, chain.arguments, parameters, names)
        limit = sum(num_bytes(slot.aval) for slot in slots_of(chain.x))
        last = frozenset(chain.last)
        layers = Layers(marked, names, parameters, last, named.period, limit)
        reads, places = layers.read_by(outputs)
        columns, stacked = chain.columns(reads), marked.stacked
        return cls(program, inputs, chain, columns, places, stacked, outputs, result)

    def embed(self, inputs: Sequence[Array], num_rows: int) -> LayerCall:
        """The activations that the first layer is called with."""
        known, num_x = dict(zip(self.inputs, inputs, strict=True)), len(self.chain.x)
        values = self.program.evaluate([*self.chain.x, *self.chain.kept], known)
        read = tuple(
            tuple(function.zeros(num_rows) for function in column.reads.functions)
            for column in self.columns
        )
        x, kept = tuple(values[:num_x]), tuple(values[num_x:])
        return LayerCall(x, kept, read, self.columns)

    def context_arrays(self, inputs: Sequence[Array]) -> tuple[Array, ...]:
        """Other arrays that every layer is called with."""
        known = dict(zip(self.inputs, inputs, strict=True))
        return tuple(self.program.evaluate(self.chain.context, known))

    def head(self, inputs: Sequence[Array], x: LayerCall) -> LossResult:
        """The result of the loss function, from the results of the last layer.

        Raises:
          MeshparError: x comes from another trace that reads other values of layers.
        """
        if [c.reads for c in x.columns] != [c.reads for c in self.columns]:
            raise MeshparError(
                "the loss reads other values of layers in one trace than in another: "
                "it depends on more than its arguments (a global, a clock)"
            )
        last = zip(self.chain.last, x.x, strict=True)
        known = dict(zip(self.inputs, inputs, strict=True)) | dict(last)
        for slot, (column, function, row) in self.places.items():
            reads, values = self.columns[column].reads, x.read[column][function]
            known[slot] = reads.of_row(function, values, row)
        for slot, rows in self.stacked.items():
            if all(row in known for row in rows):
                known[slot] = jnp.stack([known[row] for row in rows])
        values = self.program.evaluate(self.outputs, known, with_effects=True)
        return jax.tree.unflatten(self.result, values)


def _check_known(named: Named, marked: MarkedProgram, atoms: Sequence[Atom]) -> None:
    """Raises MeshparError if some values come from a scan, but not from its layers."""
    program, steps = marked.program, needed(marked.program.steps, atoms, (), True)
    known = {*program.inputs, *program.constants, *marked.stacked}
    known.update(slot for call in marked.calls for slot in call.results)
    known.update(slot for step in steps for slot in step.results)
    for step in steps:
        if not known.issuperset(slots_of(step.operands)):
            raise MeshparError(
                f"layers={named.layers!r}: the loss reads at "
                f"{compat.user_line(step.eqn)} a value that nn.scan computes beside "
                "its layers; compute it in the layer, or leave layers out (layers='')"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class _Chain:
    """Calls of layers, each with the values that the layer before returned.

    Attributes:
      calls: the calls.
      sources: for each column, those of its arguments.
      returned: for each column, the leaves of its output that the next layer takes.
      x: activations that the first layer is called with.
      kept: other arguments that a gradient passes through.
      context: all other arrays.
      last: the activations that the last layer returns.
    """

    calls: tuple[Marked, ...]
    sources: tuple[tuple[Source, ...], ...]
    returned: tuple[tuple[int, ...], ...]
    x: tuple[Atom, ...]
    kept: tuple[Atom, ...]
    context: tuple[Atom, ...]
    last: tuple[Slot, ...]

    @property
    def arguments(self) -> tuple[Atom, ...]:
        """All that layers are called with, but for what layers return."""
        return (*self.x, *self.kept, *self.context)

    @classmethod
    def of(
        cls, named: Named, marked: MarkedProgram, shared: Sequence[Slot]
    ) -> "_Chain":
        """Reads the chain.

        Args:
          named: the layers.
          marked: the program.
          shared: its inputs that have gradients.

        Raises:
          MeshparError: there is none.
        """
        calls, period = marked.calls, named.period
        _check_numbers(named, calls)
        _check_alike(named, calls)
        places = [_places(named, marked, number) for number in range(period)]
        returned = _returned(named, marked, places)
        reached = dependents(marked.program.steps, shared)
        equal = value_numbers(marked.program.steps)
        others: dict[int, Source] = {}
        atoms: dict[str, list[Atom]] = {"kept": [], "fixed": []}

        def source(atom: Atom) -> Source:
            if not isinstance(atom, Slot):
                return Source("value", np.asarray(atom.val, atom.aval.dtype))
            if (number := equal(atom)) not in others:
                has_gradient = atom in reached and _is_floating(atom)
                own = atoms[kind := "kept" if has_gradient else "fixed"]
                others[number] = Source(kind, len(own))
                own.append(atom)
            return others[number]

        def sources(column: int) -> tuple[Source, ...]:
            call, operands, _ = calls[column]
            arrays = dict(zip(call.array_numbers, operands, strict=True))
            numbers = {leaf: i for i, leaf in enumerate(places[column])}
            return tuple(
                Source("x", numbers[leaf])
                if leaf in numbers
                else source(arrays[leaf])
                if leaf in arrays
                else Source("value", call.flags[leaf])
                for leaf in range(call.tree.num_leaves)
            )

        every = tuple(map(sources, range(period)))
        _check_others(named, marked, places, equal)
        x = tuple(_operand(calls[0], leaf) for leaf in places[0])
        last = tuple(calls[-1].results[i] for i in returned[-1])
        _check_types(named, calls[0], x, returned[0])
        kept, context = map(tuple, atoms.values())
        return cls(calls, every, returned, x, kept, context, last)

    def columns(self, reads: Sequence[Reads]) -> tuple[Column, ...]:
        """The layers of the first row."""
        return tuple(
            Column(marked.call.configuration, marked.call.tree, sources, returned, own)
            for marked, sources, returned, own in zip(
                self.calls, self.sources, self.returned, reads, strict=False
            )
        )


def _operand(marked: Marked, leaf: int) -> Atom:
    """An argument of a call, by its number among all leaves."""
    return marked.operands[marked.call.array_numbers.index(leaf)]


def _is_floating(atom: Atom) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.floating)


def _check_numbers(named: Named, calls: Sequence[Marked]) -> None:
    """Raises MeshparError if layers are not called once each, in order."""
    for due, marked in enumerate(calls):
        if marked.call.number != due:
            raise MeshparError(
                f"layers={named.layers!r}: the loss function calls layer "
                f"{marked.call.number} when layer {due} is due; each layer runs once, "
                "in order"
            )
    if len(calls) != named.num_layers:
        raise MeshparError(
            f"layers={named.layers!r}: the loss function calls {len(calls)} of "
            f"{named.num_layers} layers; it has to call each of them once, by the "
            "layer's __call__"
        )


def _check_alike(named: Named, calls: Sequence[Marked]) -> None:
    """Raises MeshparError if layers of one column are called in different ways."""
    for number, marked in enumerate(calls):
        call, first = marked.call, calls[number % named.period].call
        if call.num_first != first.num_first:
            raise MeshparError(
                f"{first.layer} takes {first.num_first} arrays of activations and "
                f"{call.layer} {call.num_first} arrays, as the layer before returned: "
                "hand on the activations alone, and use other values outside the layers"
            )
        if call.configuration != first.configuration:
            raise MeshparError(
                f"layers={named.layers!r}: the loss function gives layer {number} "
                f"other attributes than layer {first.number}, which has its place in "
                "the pattern; give them the same ones"
            )
        if call.tree != first.tree or call.flags != first.flags:
            raise _other_arguments(named, number, first.number)


def _other_arguments(named: Named, number: int, first: int) -> MeshparError:
    return MeshparError(
        f"layers={named.layers!r}: layer {number} is called with other arguments than "
        f"layer {first}, beside its activations; make them attributes of the layer, or "
        "compute them once before the layers"
    )


def _places(named: Named, marked: MarkedProgram, column: int) -> tuple[int, ...]:
    """The leaves of a column's arguments that the layer before returned.

    Raises:
      MeshparError: none.
    """
    calls = marked.calls
    if len(calls) == 1:
        return tuple(range(calls[0].call.num_first))
    number = column or named.period  # The first layer has none before it.
    own, before = calls[number], calls[number - 1]
    pairs = zip(own.call.array_numbers, own.operands, strict=True)
    found = tuple(leaf for leaf, atom in pairs if _is_one_of(atom, before.results))
    if not found:
        steps = marked.program.steps
        reached = dependents(steps, before.results)
        between = not reached.isdisjoint(slots_of(own.operands))
        problem = (
            f"the model computes between layers {number - 1} and {number}; move that "
            "into the layer, so that"
            if between
            else f"layer {number} is called with nothing that layer {number - 1} "
            "returned;"
        )
        raise MeshparError(
            f"layers={named.layers!r}: {problem} each layer takes the values that the "
            "layer before returned"
        )
    return found


def _is_one_of(atom: Atom, slots: Sequence[Slot]) -> bool:
    return isinstance(atom, Slot) and atom in slots


def _returned(
    named: Named, marked: MarkedProgram, places: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """For each column the leaves of its output that are the next activations."""
    calls, period = marked.calls, named.period
    if len(calls) == 1:
        return (_first_of_types(named, calls[0], places[0]),)
    found: dict[int, tuple[int, ...]] = {}
    for number in range(1, len(calls)):
        own, before = calls[number], calls[number - 1]
        operands = [_operand(own, leaf) for leaf in places[number % period]]
        if not all(_is_one_of(atom, before.results) for atom in operands):
            raise _other_arguments(named, number, number % period)
        leaves = tuple(before.results.index(atom) for atom in operands)
        if found.setdefault((number - 1) % period, leaves) != leaves:
            raise _other_arguments(named, number, number % period)
    return tuple(found[column] for column in range(period))


def _first_of_types(
    named: Named, marked: Marked, places: Sequence[int]
) -> tuple[int, ...]:
    """The leaves of an only layer's output that have the types of its activations."""
    left, found = list(enumerate(marked.results)), []
    for leaf in places:
        kind = _type(_operand(marked, leaf))
        match = next((i for i, slot in left if _type(slot) == kind), None)
        if match is None:
            x = [_operand(marked, leaf) for leaf in places]
            raise _other_types(named, 0, x, marked.results)
        left = [(i, slot) for i, slot in left if i > match]
        found.append(match)
    return tuple(found)


def _type(atom: Atom) -> tuple:
    return atom.aval.shape, atom.aval.dtype


def _other_types(
    named: Named, number: int, before: Sequence[Atom], after: Sequence[Atom]
) -> MeshparError:
    old, new = (", ".join(describe(x.aval) for x in xs) for xs in (before, after))
    return MeshparError(
        f"{named.name(number)} turns {old} into {new}: layers that meshpar runs one by "
        "one return activations of the shapes and dtypes that they take"
    )


def _check_types(
    named: Named, first: Marked, x: Sequence[Atom], returned: Sequence[int]
) -> None:
    """Raises MeshparError if a layer changes the types of its activations."""
    after = [first.results[i] for i in returned]
    if list(map(_type, x)) != list(map(_type, after)):
        raise _other_types(named, 0, x, after)
    if not all(map(_is_floating, x)):
        raise MeshparError(
            f"{named.name(0)} returns {', '.join(describe(s.aval) for s in after)}: "
            "layers that meshpar runs one by one hand on floating-point activations"
        )


def _check_others(
    named: Named,
    marked: MarkedProgram,
    places: Sequence[tuple[int, ...]],
    equal: Callable[[Atom], int],
) -> None:
    """Raises MeshparError if layers of one column get different arrays."""
    for number, own in enumerate(marked.calls):
        column = number % named.period
        first = marked.calls[column]
        leaves = zip(own.call.array_numbers, own.operands, first.operands, strict=True)
        for leaf, atom, other in leaves:
            if leaf not in places[column] and equal(atom) != equal(other):
                raise _other_arguments(named, number, column)
