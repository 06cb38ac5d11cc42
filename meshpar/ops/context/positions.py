"""Positions of tokens in sequences that `context` splits."""

import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.layouts import token_order
from meshpar.layouts.axes import CONTEXT
from meshpar.layouts.scope import current_scope
from meshpar.rows.opaque import split_as_arguments


def positions(length: int) -> Array:
    """The positions, in their whole sequence, of the tokens that this call sees.

    Under a layout that splits the length a model sees a part of each sequence, and
    `jnp.arange(length)` would count each part from 0.

    Args:
      length: number of tokens that the model sees, such as `tokens.shape[1]`.

    Returns:
      int32 [length].
    """
    return split_as_arguments(lambda: _positions(length))


def _positions(length: int) -> Array:
    scope = current_scope()
    if scope is None or CONTEXT not in scope.manual_axes:
        return jnp.arange(length, dtype=jnp.int32)
    return positions_on(lax.axis_index(CONTEXT), length)


def positions_on(rank: Array, length: int) -> Array:
    """The positions of the tokens of one device along `context`, int32 [length].

    Args:
      rank: number of the device.
      length: tokens of each device.
    """
    scope = current_scope()
    assert scope is not None
    order, num = scope.layout.token_order, scope.mesh.shape[CONTEXT]
    return token_order.positions_on(order, rank, num, length)
