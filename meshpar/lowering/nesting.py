"""Nested parameters: the tree of the model from {path: array}, and back.

An optax transformation sees the model's own nested dicts, {"block": {"bias": x}}, so
that masks and labels by path mean what they say. Everything else sees {path: array}.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from meshpar.arrays import Params


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

    def flatten_all(self, tree: Any) -> Any:
        """The tree with every params-shaped dict in it flattened, inner ones too."""

        def convert(node: Any) -> Any:
            if not self._is_nested(node):
                return node
            flat = self.flatten(node)
            return {path: self.flatten_all(value) for path, value in flat.items()}

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
    """The two forms of an optimizer state: as the optimizer makes it, and flat.

    Both have the same leaves in another order, so that each gives the other exactly.

    Attributes:
      nested: the structure as the optimizer makes it.
      flat: the structure with {path: leaf} in place of nested dicts.
      order: for every leaf of `flat`, its number in `nested`.
    """

    nested: Any
    flat: Any
    order: tuple[int, ...]

    @classmethod
    def of(cls, state: Any, nesting: Nesting) -> "NestedState":
        """The forms of a state with nested parameters."""
        structure = jax.tree.structure(state)
        numbers = jax.tree.unflatten(structure, range(structure.num_leaves))
        order, flat = jax.tree.flatten(nesting.flatten_all(numbers))
        return cls(structure, flat, tuple(order))

    def flatten(self, state: Any) -> Any:
        """The flat form of a state."""
        leaves = self.nested.flatten_up_to(state)
        return jax.tree.unflatten(self.flat, [leaves[number] for number in self.order])

    def nest(self, state: Any) -> Any:
        """The nested form of a state: the inverse of `flatten`."""
        leaves = dict(zip(self.order, self.flat.flatten_up_to(state), strict=True))
        return jax.tree.unflatten(self.nested, [leaves[n] for n in range(len(leaves))])
