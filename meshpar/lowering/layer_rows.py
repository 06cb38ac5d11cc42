"""Rows of stacks: which row of which stack holds which parameter of the model.

Programs store layers stacked, and a pipeline may store them in another order, padded
with zeros. Users and their optimizers see the model's own parameters,
{"layers/0/up/kernel": array}.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.arrays import Params, row_key


@dataclasses.dataclass(frozen=True)
class RowNumbers:
    """Numbers of the leaves that are the rows of one stack; None for padding."""

    numbers: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class LayerRows:
    """Converts between stored parameters, layers stacked, and the model's own.

    Attributes:
      rows: {path of a stack: the model's path of each row, None for padding}. What is
        in no stack has the same path in both forms.
    """

    rows: Mapping[str, tuple[str | None, ...]]

    @functools.cached_property
    def places(self) -> dict[str, tuple[str, int]]:
        """{the model's path: (path of the stack, number of the row)}."""
        return {
            path: (stack, number)
            for stack, paths in self.rows.items()
            for number, path in enumerate(paths)
            if path is not None
        }

    @functools.cached_property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the rows that hold layers."""
        paths = next(iter(self.rows.values()), ())
        return tuple(n for n, path in enumerate(paths) if path is not None)

    @property
    def padding(self) -> tuple[bool, ...]:
        """For each row, whether it is padding."""
        paths = next(iter(self.rows.values()), ())
        return tuple(path is None for path in paths)

    def only(self, params: Mapping[str, Any]) -> "LayerRows":
        """The rows of those stacks that are among some parameters."""
        rows = {stack: paths for stack, paths in self.rows.items() if stack in params}
        return LayerRows(rows)

    def unstacked(
        self, params: Mapping[str, Any], row: Callable[[Any, int], Any] | None = None
    ) -> dict[str, Any]:
        """{the model's path: array} from {path as stored: array}.

        Args:
          params: {path as stored: anything}.
          row: (stack, number) -> row; by default of arrays.
        """
        row = row or (lambda x, number: x[number])
        found: dict[str, Any] = {}
        for path, x in params.items():
            if path not in self.rows:
                found[path] = x
                continue
            for number, own in enumerate(self.rows[path]):
                if own is not None:
                    found[own] = row(x, number)
        return found

    def stacked(self, params: Mapping[str, Any]) -> Params:
        """{path as stored: array} from {the model's path: array}."""
        found = {path: x for path, x in params.items() if path not in self.places}
        for stack, paths in self.rows.items():
            if any(path in params for path in paths):
                found[stack] = stack_rows(
                    [None if p is None else params[p] for p in paths]
                )
        return found

    def grouped(self, flat: Mapping[str, Any], leaves: list[Any]) -> dict[str, Any]:
        """Numbers of leaves by stored path, the leaves of one stack together.

        Rows that do not all have leaves of the same shapes have keys of their own.

        Args:
          flat: {the model's path: tree of numbers of leaves}.
          leaves: all leaves, with shapes and dtypes.
        """
        found = dict(flat)  # A stack may have the path of a layer.
        stacks: dict[str, Any] = {}
        for stack, paths in self.rows.items():
            own = [path for path in paths if path in flat]
            alike = len({_form(flat[path], leaves) for path in own}) == 1
            if alike and len(own) == len(self.layers):
                trees = [None if path is None else found.pop(path) for path in paths]
                stacks[stack] = _together(trees)
                continue
            stacks |= {row_key(stack, path): found.pop(path) for path in own}
        return found | stacks


def stack_rows(rows: list[Any]) -> Any:
    """Stacks arrays [...] to [number of rows, ...]; None is a row of zeros."""
    like = next(x for x in rows if x is not None)
    return jnp.stack([jnp.zeros_like(like) if x is None else x for x in rows])


def _form(tree: Any, leaves: list[Any]) -> tuple:
    """The structure, shapes and dtypes of a tree of numbers of leaves."""
    numbers, structure = jax.tree.flatten(tree)
    if any(isinstance(number, RowNumbers) for number in numbers):
        return (object(),)  # Together already, as inner parameters of parameters.
    return structure, tuple((leaves[n].shape, leaves[n].dtype) for n in numbers)


def _together(trees: list[Any]) -> Any:
    """One tree of `RowNumbers` from those of the rows; None for padding."""
    like = next(tree for tree in trees if tree is not None)
    structure = jax.tree.structure(like)
    rows = [tree if tree is None else jax.tree.leaves(tree) for tree in trees]
    columns = range(structure.num_leaves)
    numbers = (
        RowNumbers(tuple(None if row is None else row[i] for row in rows))
        for i in columns
    )
    return jax.tree.unflatten(structure, list(numbers))
