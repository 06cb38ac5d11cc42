"""Nested parameters: the tree of the model from {path: array}, and back.

An optax transformation sees the model's own nested dicts, {"block": {"bias": x}}, so
that masks and labels by path mean what they say. Everything else sees {path: array}.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from meshpar.arrays import Params
from meshpar.lowering.layer_rows import LayerRows, RowNumbers, stack_rows


@dataclasses.dataclass(frozen=True)
class Nesting:
    """Converts between flat and nested dicts of one model's parameters.

    Attributes:
      keys: {path: its keys in the nested dicts}.
    """

    keys: Mapping[str, tuple[Any, ...]]

    @functools.cached_property
    def _tree(self) -> dict[Any, Any]:
        """The nested dicts, with paths as leaves."""
        return self.nest({path: path for path in self.keys})

    @functools.cached_property
    def paths(self) -> list[str]:
        """Paths in the order of the leaves of the nested dicts."""
        return jax.tree.leaves(self._tree)

    def nest(self, flat: Mapping[str, Any]) -> dict[Any, Any]:
        """Nested dicts from {path: value}."""
        nested: dict[Any, Any] = {}
        for path, value in flat.items():
            *above, last = self.keys[path]
            inner = nested
            for key in above:
                inner = inner.setdefault(key, {})
            inner[last] = value
        return nested

    def flatten(self, nested: Mapping[Any, Any]) -> Params:
        """{path: value} from nested dicts.

        A value may stand for all parameters below it; it keeps their common path.
        """
        return dict(_cut(self._tree, nested))

    def flatten_all(self, tree: Any, merge: Callable[[dict], dict] = dict) -> Any:
        """The tree with every params-shaped dict in it flattened, inner ones too.

        Args:
          tree: any tree.
          merge: {path: value} -> the dict that takes its place.
        """

        def convert(node: Any) -> Any:
            if not self._is_nested(node):
                return node
            flat = merge(self.flatten(node))
            return {p: self.flatten_all(value, merge) for p, value in flat.items()}

        return jax.tree.map(convert, tree, is_leaf=self._is_nested)

    def _is_nested(self, node: Any) -> bool:
        return type(node) is dict and node.keys() == self._tree.keys()


def _cut(
    tree: Any, nested: Mapping[Any, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """(path, value) where the dicts of `nested` end, or those of `tree`."""
    for key, below in tree.items():
        path, value = f"{prefix}{key}", nested[key]
        both = isinstance(below, dict) and isinstance(value, dict)
        if both and below.keys() == value.keys():
            yield from _cut(below, value, f"{path}/")
        else:
            yield path, value


@dataclasses.dataclass(frozen=True)
class NestedState:
    """The two forms of an optimizer state: as the optimizer makes it, and as stored.

    Stored states have {path: leaf} in place of nested dicts, and layers stacked.

    Attributes:
      nested: the structure as the optimizer makes it.
      stored: the structure as stored.
      order: for every leaf as stored, its number in `nested`, or those of its rows.
    """

    nested: Any
    stored: Any
    order: tuple[int | RowNumbers, ...]

    @classmethod
    def of(cls, state: Any, nesting: Nesting, rows: LayerRows) -> "NestedState":
        """The forms of a state with nested parameters.

        Args:
          state: as the optimizer makes it.
          nesting: of the parameters that it sees.
          rows: how these are stored.
        """
        leaves, structure = jax.tree.flatten(state)
        numbers = jax.tree.unflatten(structure, range(len(leaves)))
        stored = nesting.flatten_all(numbers, lambda flat: rows.grouped(flat, leaves))
        order, stored = jax.tree.flatten(stored)
        return cls(structure, stored, tuple(order))

    def store(self, state: Any) -> Any:
        """The state as stored."""
        leaves = self.nested.flatten_up_to(state)

        def leaf(place: int | RowNumbers) -> Any:
            if not isinstance(place, RowNumbers):
                return leaves[place]
            return stack_rows([None if n is None else leaves[n] for n in place.numbers])

        return jax.tree.unflatten(self.stored, [leaf(place) for place in self.order])

    def nest(self, state: Any) -> Any:
        """The state as the optimizer makes it: the inverse of `store`."""
        leaves: dict[int, Any] = {}
        for place, x in zip(self.order, self.stored.flatten_up_to(state), strict=True):
            if not isinstance(place, RowNumbers):
                leaves[place] = x
                continue
            leaves |= {n: x[i] for i, n in enumerate(place.numbers) if n is not None}
        return jax.tree.unflatten(self.nested, [leaves[n] for n in range(len(leaves))])
