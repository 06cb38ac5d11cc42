"""Arrays that a program has placed itself, known without keeping them alive."""

import weakref
from typing import Any

import jax


class PlacedArrays:
    """A set of arrays that forgets those that nothing else holds."""

    def __init__(self) -> None:
        self._arrays: dict[int, weakref.ref] = {}

    def add(self, tree: Any) -> Any:
        """Notes the arrays of a pytree, and returns it."""
        for x in jax.tree.leaves(tree):
            number = id(x)
            forget = lambda _, number=number: self._arrays.pop(number, None)  # noqa: E731
            self._arrays[number] = weakref.ref(x, forget)
        return tree

    def holds(self, tree: Any) -> bool:
        """Whether all arrays of a pytree are known."""
        return all(self._is_known(x) for x in jax.tree.leaves(tree))

    def _is_known(self, x: Any) -> bool:
        known = self._arrays.get(id(x))
        return known is not None and known() is x
