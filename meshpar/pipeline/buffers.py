"""What waits between the ticks of a pipeline, and how it gets from stage to stage.

A buffer is a tree of arrays [slots + 1, ...], whose last slot takes what nobody needs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.layouts.axes import PIPE

AXIS = PIPE
"""The mesh axis of the stages."""


def send_to_stage(x: Any, step: int, num_stages: int, wraps: bool = False) -> Any:
    """From every stage to the one after (step=1) or before (step=-1).

    The last stage sends to the first one only if `wraps`; who gets nothing gets zeros.
    """
    pairs = [
        (stage, (stage + step) % num_stages)
        for stage in range(num_stages)
        if wraps or 0 <= stage + step < num_stages
    ]
    return jax.tree.map(lambda x: lax.ppermute(x, AXIS, pairs), x)


def zeros_like(
    like: Any, vary: Callable[[Array], Array], *lead: int, dtype: Any = None
) -> Any:
    """Zeros [*lead, ...] of the shapes of a tree."""
    return jax.tree.map(
        lambda x: vary(jnp.zeros((*lead, *x.shape), dtype or x.dtype)), like
    )


def take_slot(buffer: Any, slot: Array) -> Any:
    """What lies in a slot."""
    return jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, slot, keepdims=False), buffer
    )


def put_slot(buffer: Any, slot: Array, value: Any) -> Any:
    """The buffer with a value in a slot."""
    return jax.tree.map(
        lambda x, new: lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), slot, 0),
        buffer,
        value,
    )


def where_tree(on: Array, value: Any, other: Any) -> Any:
    """One tree or the other."""
    return jax.tree.map(lambda a, b: jnp.where(on, a, b), value, other)
