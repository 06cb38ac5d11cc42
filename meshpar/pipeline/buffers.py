"""Buffers between the ticks of a pipeline, and the sends between its stages.

A buffer is a tree of arrays [slots + 1, ...]; values that no tick reads go to the last
slot.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from meshpar.arrays import Array
from meshpar.contracts.purposes import purpose
from meshpar.fsdp.buckets import TILE
from meshpar.layouts.axes import PIPE
from meshpar.mesh.platform import traced_platform

ACTIVATIONS, GRADIENTS = "activations", "gradients"

_TO = {
    (ACTIVATIONS, 1): "activations to the next stage",
    (ACTIVATIONS, -1): "activations to the stage before",
    (GRADIENTS, -1): "gradients to the stage before",
    (GRADIENTS, 1): "gradients to the next stage",
}
"""{(what is sent, step): purpose}."""


def send_to_stage(
    x: Any, step: int, num_stages: int, what: str, wraps: bool = False
) -> Any:
    """Sends a tree from every stage to the next (step=1) or the previous (step=-1) one.

    Only if `wraps` do the last stage and the first one send to each other; otherwise
    the stage at the end receives zeros. With step=0 every stage keeps its own.
    """
    if not step:
        return x
    pairs = [
        (stage, (stage + step) % num_stages)
        for stage in range(num_stages)
        if wraps or 0 <= stage + step < num_stages
    ]
    with purpose(_TO[what, step], ""):
        return jax.tree.map(lambda x: lax.ppermute(x, PIPE, pairs), x)


def zeros_like(
    like: Any, vary: Callable[[Array], Array], *lead: int, dtype: Any = None
) -> Any:
    """Zeros [*lead, ...] for every leaf of a tree, in its dtype or the given one."""
    return jax.tree.map(
        lambda x: vary(jnp.zeros((*lead, *x.shape), dtype or x.dtype)), like
    )


def take_slot(buffer: Any, slot: Array) -> Any:
    """Reads a slot of a buffer."""
    return jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, slot, keepdims=False), buffer
    )


def put_slot(buffer: Any, slot: Array, value: Any) -> Any:
    """Returns the buffer with `value` in a slot."""
    return jax.tree.map(
        lambda x, new: lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), slot, 0),
        buffer,
        value,
    )


def in_one_order(tree: Any) -> Any:
    """A tree in an order in memory that all who write and read a buffer agree on.

    Where conditionals write and read it, each may choose its own order otherwise, and
    the whole buffer is copied from one to the other in every tick
    (`Platform.copies_to_orders`). The last dim varies fastest, unless only another one
    fills whole tiles.
    """
    if not traced_platform().copies_to_orders:
        return tree
    return jax.tree.map(lambda x: with_layout_constraint(x, _order(x.shape)), tree)


def _order(shape: tuple[int, ...]) -> Layout:
    """The order of dims in memory, of which the last one varies fastest."""
    dims = list(range(len(shape)))
    full = [dim for dim in dims if shape[dim] % TILE[1] == 0]
    if full and dims[-1] not in full:
        fastest = max(full, key=shape.__getitem__)
        dims.remove(fastest)
        dims.append(fastest)
    return Layout(tuple(dims))


def where_tree(on: Array, value: Any, other: Any) -> Any:
    """`jnp.where` on every leaf of two trees."""
    return jax.tree.map(lambda a, b: jnp.where(on, a, b), value, other)
