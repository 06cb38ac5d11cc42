"""Reads of a loss: results of layers before the last, and their parameters.

Layers run one by one, so that only the last one's output is there when the head runs.
What else the loss reads of a layer (its output for an early exit or deep supervision, a
penalty on its activations, the norm of its weights) is computed where the layer runs,
as far as it depends on that layer alone, and travels with the activations.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar import compat
from meshpar.arrays import Array, Params, num_bytes, vary
from meshpar.errors import MeshparError
from meshpar.jaxprs.straight_line import (
    Atom,
    Slot,
    Step,
    dependents,
    evaluate,
    needed,
    slots_of,
    value_numbers,
)
from meshpar.models.layer_marks import MarkedProgram

_OUTSIDE = -1
"""Owner of what depends on the batch, on shared parameters or on several layers."""


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """A value that the loss reads of a layer.

    Attributes:
      steps: compute it.
      output: the value.
      parameters: {slot: path within the layer}.
      results: {slot: number of a leaf of the layer's output}.
      constants: {slot: array}.
    """

    steps: tuple[Step, ...]
    output: Slot
    parameters: Mapping[Slot, str]
    results: Mapping[Slot, int]
    constants: Mapping[Slot, Any]

    @property
    def kind(self) -> tuple:
        """Equal for functions that are equal in two traces."""
        names = tuple(step.eqn.primitive.name for step in self.steps)
        return self.output.aval.shape, self.output.aval.dtype, names

    @property
    def axis(self) -> int:
        """The dim of `zeros` that holds the layers; rows and length stay before it."""
        return min(2, len(self.output.aval.shape))

    def zeros(self, num_layers: int) -> Array:
        """The values of all layers of a column, before the first has run."""
        shape = list(self.output.aval.shape)
        shape.insert(self.axis, num_layers)
        return jnp.zeros(shape, self.output.aval.dtype)

    def followed(self, values: Array, own: Array) -> Array:
        """The values after one more layer has run; the last is at the end."""
        axes = jax.typeof(values).manual_axis_type.varying
        own = jnp.expand_dims(vary(own, tuple(axes)), self.axis)
        num_layers = values.shape[self.axis]
        if num_layers == 1:
            return own
        before = lax.slice_in_dim(values, 1, num_layers, axis=self.axis)
        return lax.concatenate([before, own], self.axis)

    def __call__(self, layer: str, params: Params, leaves: Sequence[Array]) -> Array:
        """The value.

        Args:
          layer: the layer, for errors.
          params: {path within the layer: array}.
          leaves: of the layer's output.

        Raises:
          MeshparError: this device has a part of a parameter alone.
        """
        env = {**self.constants}
        for slot, path in self.parameters.items():
            x = params[path]
            if x.shape != slot.aval.shape:
                raise MeshparError(
                    f"the loss reads the parameter {path} of {layer}, of which a "
                    f"device has {list(x.shape)} of {list(slot.aval.shape)}: leave "
                    "layers out (layers=''), or the axis that splits it (expert=)"
                )
            env[slot] = x.astype(slot.aval.dtype)
        env.update({slot: leaves[number] for slot, number in self.results.items()})
        return evaluate(self.steps, [self.output], env)[0]


@dataclasses.dataclass(frozen=True)
class Reads:
    """The reads of the loss from the layers of one column.

    Attributes:
      functions: of each value.
    """

    functions: tuple[Function, ...] = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Reads):
            return NotImplemented
        return [f.kind for f in self.functions] == [f.kind for f in other.functions]

    def __hash__(self) -> int:
        return len(self.functions)

    def followed(
        self,
        layer: str,
        params: Params,
        leaves: Sequence[Array],
        before: tuple[Array, ...],
    ) -> tuple[Array, ...]:
        """The values of all rows after one more has run.

        Args:
          layer: the layer, for errors.
          params: {path within the layer: array}.
          leaves: of the layer's output.
          before: for each function the values of the rows before, by `Function.zeros`.
        """
        return tuple(
            function.followed(values, function(layer, params, leaves))
            for function, values in zip(self.functions, before, strict=True)
        )

    def of_row(self, function: int, values: Array, row: int) -> Array:
        """The value of one row."""
        axis = self.functions[function].axis
        return lax.index_in_dim(values, row, axis, keepdims=False)


class Place(NamedTuple):
    """Where the head finds what it reads of a layer.

    Attributes:
      column: of the layer.
      function: number of the value.
      row: of the layer.
    """

    column: int
    function: int
    row: int


@dataclasses.dataclass(frozen=True, eq=False)
class Layers:
    """The layers of a marked program, as far as a loss may read them.

    Attributes:
      marked: the program.
      names: of each layer, for errors.
      parameters: {slot: (number of the layer, path within it)}; None as number of what
        holds those of all layers.
      last: what the head gets in any case, the output of the last layer.
      period: number of columns.
      limit: most bytes that may be read of a layer's parameters alone.
    """

    marked: MarkedProgram
    names: Sequence[str]
    parameters: Mapping[Slot, tuple[int | None, str]]
    last: frozenset[Slot]
    period: int
    limit: int

    def read_by(
        self, outputs: Sequence[Atom]
    ) -> tuple[tuple[Reads, ...], dict[Slot, Place]]:
        """(values that are read of each column, {slot: where the head finds it}).

        Args:
          outputs: results of the loss function.

        Raises:
          MeshparError: it reads what layers cannot hand on.
        """
        program = self.marked.program
        outputs = [*outputs, *self._rows_of_stacks(outputs)]
        self._check_whole_stacks(outputs)
        sources = self._sources()
        owners = self._owners(sources)
        read: dict[Slot, Any] = {
            slot: None
            for slot in slots_of(outputs)
            if owners.get(slot, _OUTSIDE) != _OUTSIDE
        }
        for step in needed(program.steps, outputs, with_effects=True):
            if all(owners.get(s, _OUTSIDE) == _OUTSIDE for s in step.results):
                for slot in slots_of(step.operands):
                    if owners.get(slot, _OUTSIDE) != _OUTSIDE:
                        read.setdefault(slot, step.eqn)
        read = self._smallest(read, owners, sources)
        self._check(read, owners, sources)
        return self._functions(read, owners, sources)

    def _rows_of_stacks(self, outputs: Sequence[Atom]) -> list[Slot]:
        """Rows of what scans return, where the loss reads it."""
        stacked = self.marked.stacked
        live = set(slots_of(outputs))
        for step in needed(self.marked.program.steps, outputs, with_effects=True):
            live.update(slots_of(step.operands))
        return [row for slot in stacked if slot in live for row in stacked[slot]]

    def _check_whole_stacks(self, outputs: Sequence[Atom]) -> None:
        """Raises MeshparError if the loss reads what holds all layers' parameters."""
        whole = {
            s: path for s, (number, path) in self.parameters.items() if number is None
        }
        for step in needed(self.marked.program.steps, outputs, with_effects=True):
            for slot in slots_of(step.operands):
                if slot in whole:
                    raise MeshparError(
                        f"the loss reads the parameter {whole[slot]} of all layers "
                        f"that nn.scan stacks ({compat.user_line(step.eqn)}), and "
                        "meshpar runs it without the layers; call the layers one by "
                        "one, let the optimizer do it (optax.add_decayed_weights), or "
                        "leave layers out (layers='')"
                    )

    def _sources(self) -> dict[Slot, tuple[int, Any]]:
        """{slot: (layer, path of a parameter or number of a result)}."""
        own = self.parameters.items()
        sources: dict[Slot, tuple[int, Any]] = {
            s: x for s, x in own if x[0] is not None
        }
        for number, call in enumerate(self.marked.calls):
            for leaf, slot in enumerate(call.results):
                if slot not in self.last:
                    sources[slot] = number, leaf
        return sources

    def _owners(self, sources: Mapping[Slot, tuple[int, Any]]) -> dict[Slot, int]:
        """{slot: layer}, of what depends on layers or comes from outside."""
        program = self.marked.program
        owners = {slot: _OUTSIDE for slot in (*program.inputs, *self.last)}
        owners |= {slot: number for slot, (number, _) in sources.items()}
        owners |= {slot: _OUTSIDE for slot in self.marked.stacked}
        for step in program.steps:
            found = {owners[s] for s in slots_of(step.operands) if s in owners}
            if found:
                alone = len(found) == 1 and not step.eqn.effects
                owner = found.pop() if alone else _OUTSIDE
                owners.update(dict.fromkeys(step.results, owner))
        return owners

    def _smallest(
        self,
        read: dict[Slot, Any],
        owners: Mapping[Slot, int],
        sources: Mapping[Slot, Any],
    ) -> dict[Slot, Any]:
        """The value that is read, or a smaller one from which it is computed."""
        smallest: dict[Slot, Any] = {}
        for number in sorted({owners[slot] for slot in read}):
            own = {s: eqn for s, eqn in read.items() if owners[s] == number}
            raw = {s: next(iter(own.values())) for s in self._read_from(own, sources)}
            size, of_raw = (sum(num_bytes(s.aval) for s in x) for x in (own, raw))
            smallest |= raw if of_raw < size else own
        return smallest

    def _read_from(
        self, slots: Sequence[Slot] | Mapping[Slot, Any], sources: Mapping[Slot, Any]
    ) -> list[Slot]:
        """The sources that some values are computed from."""
        live = set(slots)
        for step in needed(self.marked.program.steps, slots, sources):
            live.update(slots_of(step.operands))
        return [slot for slot in sources if slot in live]

    def _check(
        self,
        read: Mapping[Slot, Any],
        owners: Mapping[Slot, int],
        sources: Mapping[Slot, tuple[int, Any]],
    ) -> None:
        """Raises MeshparError for values that do not travel with activations."""
        for slot, eqn in read.items():
            name, line = self.names[owners[slot]], eqn and compat.user_line(eqn)
            place = f" ({line})" if line else ""
            if not jnp.issubdtype(slot.aval.dtype, jnp.floating):
                raise MeshparError(
                    f"the loss reads {slot.aval.dtype}{list(slot.aval.shape)} of "
                    f"{name}{place}, and only floating-point values travel with the "
                    "activations; convert it in the layer (x.astype(jnp.float32)), or "
                    "leave layers out (layers='')"
                )
            inputs = [sources[s][1] for s in self._read_from([slot], sources)]
            of_parameters = all(isinstance(x, str) for x in inputs)
            if of_parameters and num_bytes(slot.aval) > self.limit:
                raise MeshparError(
                    f"the loss reads the parameter {inputs[0]} of {name}{place} "
                    "together with other values, and meshpar runs it without the "
                    "layers; reduce it first (a norm of each weight), let the "
                    "optimizer do it (optax.add_decayed_weights), or leave layers out "
                    "(layers='')"
                )

    def _functions(
        self,
        read: Mapping[Slot, Any],
        owners: Mapping[Slot, int],
        sources: Mapping[Slot, tuple[int, Any]],
    ) -> tuple[tuple[Reads, ...], dict[Slot, Place]]:
        """Equal functions of a column are one."""
        program = self.marked.program
        known: dict[Slot, Any] = {
            slot: (number % self.period, leaf)
            for slot, (number, leaf) in sources.items()
        }
        known |= {slot: ("constant", id(x)) for slot, x in program.constants.items()}
        numbers = value_numbers(program.steps, known)
        columns: list[dict[int, Function]] = [{} for _ in range(self.period)]
        places = {}
        for slot in read:
            row, column = divmod(owners[slot], self.period)
            functions = columns[column]
            if (number := numbers(slot)) not in functions:
                functions[number] = self._function(slot, sources)
            places[slot] = Place(column, list(functions).index(number), row)
        reads = tuple(Reads(tuple(functions.values())) for functions in columns)
        return reads, places

    def _function(
        self, slot: Slot, sources: Mapping[Slot, tuple[int, Any]]
    ) -> Function:
        steps = needed(self.marked.program.steps, [slot], sources)
        used = {s: sources[s][1] for s in self._read_from([slot], sources)}
        return Function(
            steps,
            slot,
            {s: leaf for s, leaf in used.items() if isinstance(leaf, str)},
            {s: leaf for s, leaf in used.items() if not isinstance(leaf, str)},
            self.marked.program.constants,
        )


def check_inputs(
    marked: MarkedProgram,
    slots: Sequence[Atom],
    parameters: Mapping[Slot, tuple[int, str]],
    names: Sequence[str],
) -> None:
    """Refuses arguments of the first layer that are made of layers' parameters.

    Raises:
      MeshparError: they are.
    """
    steps = needed(marked.program.steps, slots)
    reached = dependents(steps, parameters)
    for slot in slots_of(slots):
        if slot in reached:
            first = next(s for s in parameters if slot in dependents(steps, [s]))
            number, path = parameters[first]
            raise MeshparError(
                f"an argument of {names[0]} depends on the parameter {path} of "
                f"{names[number or 0]}; give the model a parameter of its own outside "
                "the layers, or leave layers out (layers='')"
            )
