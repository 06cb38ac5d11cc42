"""The update of a model's own parameters, run on stacks of layers.

An optimizer sees the model's own tree, one tensor for each layer. Where its update
treats all layers alike, it runs on a whole stack at once: as it is, if it is proved to
be the same function of a stack (Adam), or else with every operation vectorized over the
layers (Muon, LAMB). Where layers are treated differently, it runs layer by layer.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
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


class LayersAtOnce(LayerValues):
    """Runs an update of the model's own tensors, vectorized over the layers.

    Attributes:
      rows: how layers are stacked.
      common: {number: array} of values of no layer.
      stacks: {number: array [number of rows, ...]} of values of each layer.
    """

    def __init__(self, rows: LayerRows) -> None:
        super().__init__(rows.layers, exact=True)
        self.rows = rows
        self.common: dict[int, Any] = {}
        self.stacks: dict[int, Any] = {}

    def results(
        self,
        closed: Any,
        leaves: Sequence[Leaf],
        arrays: Mapping[Hashable, Array],
        order: Sequence[int | RowNumbers],
    ) -> list[Array]:
        """The results as stored.

        Args:
          closed: jaxpr of the update of the model's own tensors.
          leaves: its arguments.
          arrays: {role: array} of the arguments as stored.
          order: for each result as stored, its number, or those of its rows.
        """
        for leaf in leaves:
            held = self.common if leaf.layer is None else self.stacks
            held[self.leaf(leaf).number] = arrays[leaf.role]
        values = treats_alike(self.outputs(closed, leaves), order)
        return [
            self._stored(value, isinstance(place, RowNumbers))
            for value, place in zip(values, order, strict=True)
        ]

    def _stored(self, value: Value, is_stack: bool) -> Array:
        if not is_stack:
            return self._row(value)
        num = len(self.rows.padding)
        if value.layer is None:
            x = jnp.asarray(self.common[value.number])
            x = jnp.broadcast_to(x, (num, *x.shape))
        else:
            x = self.stacks[value.number]
        if not any(self.rows.padding) or len(x) != num:
            return x
        padded = np.expand_dims(self.rows.padding, tuple(range(1, x.ndim)))
        return jnp.where(padded, jnp.zeros_like(x), x)

    def _row(self, value: Value) -> Array:
        """The array of one value."""
        if value.layer is None:
            return self.common[value.number]
        return self.stacks[value.number][value.layer]

    def constant(self, value: Any) -> Value:
        found = super().constant(value)
        self.common.setdefault(found.number, value)
        return found

    def computed(
        self, eqn: Any, operands: list[Value], key: tuple[Hashable, ...]
    ) -> list[Value]:
        values = super().computed(eqn, operands, key)
        self._hold(values, operands, lambda *args: compat.bind(eqn, args))
        return values

    def chosen(self, eqn: Any, predicate: Value, options: list[Value]) -> Value:
        value = super().chosen(eqn, predicate, options)

        def choose(index: Array, *options: Array) -> list[Array]:
            chosen, *rest = options
            for number, x in enumerate(rest, start=1):
                chosen = jnp.where(index == number, x, chosen)
            return [chosen]

        self._hold([value], [predicate, *options], choose)
        return value

    def _hold(
        self, values: list[Value], operands: list[Value], run: Callable[..., Any]
    ) -> None:
        """Computes values that are not known yet."""
        of_layers = any(value.layer is not None for value in values)
        held = self.stacks if of_layers else self.common
        if all(value.number in held for value in values):
            return
        if of_layers:
            args = [
                self.common[x.number] if x.layer is None else self.stacks[x.number]
                for x in operands
            ]
            axes = tuple(None if x.layer is None else 0 for x in operands)
            results = jax.vmap(lambda *args: tuple(run(*args)), axes)(*args)
        else:
            results = run(*map(self._row, operands))
        held |= zip((value.number for value in values), results, strict=True)
