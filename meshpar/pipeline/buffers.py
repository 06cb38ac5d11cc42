"""Buffers between the ticks of a pipeline, and the sends between its stages.

A buffer is a tree of arrays [slots + 1, ...]; values that no tick reads go to the last
slot.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.contracts.purposes import purpose
from meshpar.layouts.axes import PIPE

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


def where_tree(on: Array, value: Any, other: Any) -> Any:
    """`jnp.where` on every leaf of two trees."""
    return jax.tree.map(lambda a, b: jnp.where(on, a, b), value, other)
