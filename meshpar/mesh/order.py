"""The order of collectives on platforms that may mix them with those of loops.

A collective must not follow a loop with collectives that it does not read
(`Platform.mixes_collectives`). Operations that are independent then run in turn.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array, is_number
from meshpar.mesh.platform import traced_platform


def in_turn(first: Any, later: Any) -> Any:
    """A tree whose numbers wait for those of another one, where platforms need it.

    Args:
      first: a tree of arrays, split over automatic axes as those of `later`.
      later: a tree of arrays of the same shapes. No gradient passes to `first`.
    """

    def wait(first: Array, later: Array) -> Array:
        if not (is_number(first) and is_number(later)):
            return later
        # Compilers drop barriers before they schedule, and keep this 0.
        zero = jnp.nan_to_num(jnp.minimum(jnp.abs(first), 0))
        return later + lax.stop_gradient(zero).astype(later.dtype)

    mixes = traced_platform().mixes_collectives
    return jax.tree.map(wait, first, later) if mixes else later
