"""The update of a model's own parameters, run on stacks of layers.

An optimizer sees the model's own tree, one tensor for each layer. Where its update
treats all layers alike, it runs on a whole stack at once: as it is, if it is proved to
be the same function of a stack (Adam), or else with every operation vectorized over the
layers (Muon, LAMB). Where layers are treated differently, it runs layer by layer.
"""

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar import compat
from meshpar.arrays import Array
from meshpar.jaxprs.layer_values import LayerValues, Leaf, Value
from meshpar.lowering.layer_rows import LayerRows
from meshpar.lowering.nesting import NestedState, Nesting, RowNumbers

STACKS, ROWS, MODEL = "stacks", "layers at once", "layer by layer"
"""How an update runs: on stacks as it is, vectorized over layers, on each layer."""


def leaves_of(
    nesting: Nesting, forms: NestedState, rows: LayerRows, initial: bool = False
) -> list[Leaf]:
    """The arguments of an update of the model's own parameters.

    Args:
      nesting: of the model's own parameters, or of stacks if `rows` is empty.
      forms: of the optimizer state.
      rows: how layers are stacked.
      initial: whether of `init(parameters)`; else of
        `update(gradients, state, parameters, loss)`.
    """

    def of_parameters(kind: str) -> list[Leaf]:
        def leaf(path: str) -> Leaf:
            stack, number = rows.places.get(path, (path, None))
            return Leaf((kind, stack), number)

        return list(map(leaf, nesting.paths))

    if initial:
        return of_parameters("parameter")
    state: dict[int, Leaf] = {}
    for i, place in enumerate(forms.order):
        numbers = place.numbers if isinstance(place, RowNumbers) else (place,)
        for row, number in enumerate(numbers):
            layer = row if isinstance(place, RowNumbers) else None
            if number is not None:
                state[number] = Leaf(("state", i), layer)
    return [
        *of_parameters("gradient"),
        *(state[n] for n in range(len(state))),
        *of_parameters("parameter"),
        Leaf("loss"),
    ]


def results_order(
    nesting: Nesting, forms: NestedState, rows: LayerRows
) -> tuple[list[str], list[int | RowNumbers]]:
    """(paths of the updates as stored, the places of all results as stored).

    Args:
      nesting: of the parameters that the optimizer sees.
      forms: of its state.
      rows: how the parameters are stacked.
    """
    numbers = {path: i for i, path in enumerate(nesting.paths)}
    updates: dict[str, int | RowNumbers] = {
        path: i for path, i in numbers.items() if path not in rows.places
    }
    for stack, paths in rows.rows.items():
        own = (None if path is None else numbers[path] for path in paths)
        updates[stack] = RowNumbers(tuple(own))
    num = len(numbers)

    def shifted(place: int | RowNumbers) -> int | RowNumbers:
        if not isinstance(place, RowNumbers):
            return place + num
        rows = (n if n is None else n + num for n in place.numbers)
        return RowNumbers(tuple(rows))

    paths = sorted(updates)
    state = map(shifted, forms.order)
    return paths, [*(updates[path] for path in paths), *state]


def treats_alike(
    values: Sequence[Value], order: Sequence[int | RowNumbers]
) -> list[Value] | None:
    """The results as stored, one value for all rows; None if rows differ.

    Args:
      values: of the results for the model's own tensors.
      order: for each tensor as stored, its number, or those of its rows.
    """
    alike = []
    for place in order:
        if not isinstance(place, RowNumbers):
            alike.append(values[place])
            continue
        own = [(row, values[n]) for row, n in enumerate(place.numbers) if n is not None]
        first = own[0][1]
        if any(
            x.number != first.number or x.layer not in (row, None) for row, x in own
        ):
            return None
        if len({x.layer is None for _, x in own}) > 1:
            return None
        alike.append(first)
    return alike


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of an update of the model's own tensors.

    Attributes:
      operands: the values that it reads.
      results: the values that it makes.
      run: arrays -> list of arrays, of one row.
      eqn: the equation that it is; None for a choice between branches.
    """

    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    run: Callable[..., Any]
    eqn: Any = None

    @property
    def of_layers(self) -> bool:
        """Whether every layer has results of its own."""
        return any(value.layer is not None for value in self.results)

    @property
    def reads(self) -> tuple[Value, ...]:
        """The values that a step reads."""
        return self.operands

    @property
    def makes(self) -> tuple[Value, ...]:
        """The values that a step makes."""
        return self.results

    def made(self, known: Mapping[int, Array]) -> dict[int, Array]:
        """{number: array} of the results; of layers [number of rows, ...].

        Args:
          known: {number: array} of the operands; of layers [number of rows, ...].
        """
        if self.of_layers:
            args = [known[x.number] for x in self.operands]
            axes = tuple(None if x.layer is None else 0 for x in self.operands)
            results = jax.vmap(lambda *args: tuple(self.run(*args)), axes)(*args)
        else:
            results = self.run(*(row_of(known, x) for x in self.operands))
        return dict(zip((x.number for x in self.results), results, strict=True))


def row_of(known: Mapping[int, Array], value: Value) -> Array:
    """The array of one value; of its own layer, if it has one."""
    x = known[value.number]
    return x if value.layer is None else x[value.layer]


class UpdateOperations(LayerValues):
    """The operations of an update of the model's own tensors, each for all layers.

    Attributes:
      rows: how layers are stacked.
      operations: in the order of the update.
      results: the values of the results as stored; None if the update treats layers
        differently.
      kept: {key: what was found out about the update}, so that planners, which ask for
        many layouts, find it out once.
    """

    def __init__(
        self,
        rows: LayerRows,
        closed: Any,
        leaves: Sequence[Leaf],
        order: Sequence[int | RowNumbers],
        totals: bool = False,
    ) -> None:
        """Reads an update.

        Args:
          rows: how layers are stacked.
          closed: jaxpr of the update of the model's own tensors.
          leaves: its arguments.
          order: for each result as stored, its number, or those of its rows.
          totals: as of `LayerValues`.
        """
        super().__init__(rows.layers, exact=True, totals=totals)
        self.rows, self._order = rows, order
        self.operations: list[Operation] = []
        self.arguments = {self.leaf(leaf).number: leaf.role for leaf in leaves}
        self.constants_read: dict[int, Any] = {}
        self.kept: dict[Hashable, Any] = {}
        self._made: set[int] = set()
        self.results = treats_alike(self.outputs(closed, leaves), order)

    def run_steps(
        self, steps: Sequence[Any], arrays: Mapping[Hashable, Array]
    ) -> list[Array]:
        """The results as stored.

        Args:
          steps: the operations, or others that make the same values.
          arrays: {role: array} of the arguments as stored.
        """
        known = dict(self.constants_read)
        known |= {number: arrays[role] for number, role in self.arguments.items()}
        for step in steps:
            known |= step.made(known)
        return [
            self._stored(known, value, isinstance(place, RowNumbers))
            for value, place in zip(self.results, self._order, strict=True)
        ]

    def _stored(
        self, known: Mapping[int, Array], value: Value, is_stack: bool
    ) -> Array:
        if not is_stack:
            return row_of(known, value)
        x, num = known[value.number], len(self.rows.padding)
        if value.layer is None:
            x = jnp.asarray(x)
            x = jnp.broadcast_to(x, (num, *x.shape))
        if not any(self.rows.padding) or len(x) != num:
            return x
        padded = np.expand_dims(self.rows.padding, tuple(range(1, x.ndim)))
        return jnp.where(padded, jnp.zeros_like(x), x)

    def constant(self, value: Any) -> Value:
        found = super().constant(value)
        self.constants_read.setdefault(found.number, value)
        return found

    def computed(
        self, eqn: Any, operands: list[Value], key: tuple[Hashable, ...]
    ) -> list[Value]:
        values = super().computed(eqn, operands, key)
        self._note(operands, values, lambda *args: compat.bind(eqn, args), eqn)
        return values

    def chosen(self, eqn: Any, predicate: Value, options: list[Value]) -> Value:
        value = super().chosen(eqn, predicate, options)

        def choose(index: Array, *options: Array) -> list[Array]:
            chosen, *rest = options
            for number, x in enumerate(rest, start=1):
                chosen = jnp.where(index == number, x, chosen)
            return [chosen]

        self._note([predicate, *options], [value], choose)
        return value

    def _note(
        self,
        operands: Sequence[Value],
        results: Sequence[Value],
        run: Callable[..., Any],
        eqn: Any = None,
    ) -> None:
        """Notes an operation whose results are not made yet."""
        if any(value.number not in self._made for value in results):
            self._made.update(value.number for value in results)
            operation = Operation(tuple(operands), tuple(results), run, eqn)
            self.operations.append(operation)


def needed(steps: Sequence[Any], results: Collection[int]) -> list[Any]:
    """The steps that results depend on, in the same order.

    Args:
      steps: each after those whose values it reads.
      results: numbers of values.
    """
    wanted, kept = set(results), []
    for step in reversed(steps):
        if any(x.number in wanted for x in step.makes):
            wanted.update(x.number for x in step.reads)
            kept.append(step)
    return kept[::-1]


def in_order(steps: Sequence[Any]) -> Iterator[Any]:
    """The steps, each after those whose values it reads."""
    makers = {x.number: i for i, step in enumerate(steps) for x in step.makes}
    done: set[int] = set()
    for start in range(len(steps)):
        waiting = [start]
        while waiting:
            i = waiting[-1]
            read = {makers[x.number] for x in steps[i].reads if x.number in makers}
            if before := read - done - {i}:
                waiting += before
                continue
            if waiting.pop() not in done:
                done.add(i)
                yield steps[i]
