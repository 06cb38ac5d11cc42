"""Leaves of a batch without rows, such as class weights: the same on every device.

The leaves of a batch are [batch, ...]: layouts and microbatches split their rows. A
scalar has no rows, and of an array the user says so: `Replicated(array)`. Each device
and each microbatch gets all of it, and the loss sees the array itself.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from meshpar.errors import MeshparError


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Replicated:
    """A part of a batch that has no rows: every device and microbatch gets all of it.

        batch = {"x": x, "y": y, "class_weights": meshpar.Replicated(weights)}

    Loss functions see the value itself.

    Attributes:
      value: an array, or a pytree of arrays.
    """

    value: Any


def is_replicated(node: Any) -> bool:
    """Whether a node of a pytree is a `Replicated`."""
    return isinstance(node, Replicated)


def _same(x: Any) -> Any:
    return x


def map_rows(
    fn: Callable[..., Any],
    batch: Any,
    *rest: Any,
    others: Callable[..., Any] = _same,
) -> Any:
    """A batch with fn(x, ...) in place of each leaf with rows.

    Args:
      fn: of a leaf with rows.
      batch: pytree of arrays, or of anything with a shape.
      *rest: more pytrees of the same structure, whose leaves are further arguments.
      others: of a leaf without rows, and those of `rest`; by default itself.
    """

    def node(x: Any, *rest: Any) -> Any:
        if is_replicated(x):
            values = (other.value for other in rest)
            return Replicated(jax.tree.map(others, x.value, *values))
        return (fn if np.ndim(x) else others)(x, *rest)

    return jax.tree.map(node, batch, *rest, is_leaf=is_replicated)


def check_marks(like: Any, batch: Any) -> None:
    """Checks that two batches have the same leaves without rows.

    Args:
      like: the batch of a program.
      batch: one that it gets.

    Raises:
      MeshparError: one has a `Replicated` where the other has none.
    """

    def check(keys: Any, known: Any, x: Any) -> None:
        if is_replicated(known) == is_replicated(x):
            return
        wanted, given = "rows", "a meshpar.Replicated"
        if is_replicated(known):
            wanted, given = given, "rows"
        raise MeshparError(
            f"batch{jax.tree_util.keystr(keys)} has {given}, and the program was "
            f"lowered for {wanted}: give all batches in the same form"
        )

    jax.tree.map_with_path(check, like, batch, is_leaf=is_replicated)


def row_leaves(batch: Any) -> list[Any]:
    """The leaves of a batch that have rows."""
    nodes = jax.tree.leaves(batch, is_leaf=is_replicated)
    return [x for x in nodes if not is_replicated(x) and np.ndim(x)]


def num_rows(batch: Any) -> int:
    """Number of rows of a batch."""
    return row_leaves(batch)[0].shape[0]


def unmarked(batch: Any) -> Any:
    """A batch as loss functions see it, with the values of `Replicated` themselves."""
    return jax.tree.map(
        lambda x: x.value if is_replicated(x) else x, batch, is_leaf=is_replicated
    )
