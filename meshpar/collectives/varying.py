"""Sums that vary over manual mesh axes."""

import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.mesh.platform import traced_platform


def sum_varying(x: Array, axis: str) -> Array:
    """Sums an array over a manual axis; both ways in float32 on CPUs.

    XLA:CPU aborts on sums of smaller floats beside automatic axes.
    """
    if not traced_platform().widens_collectives or x.dtype.itemsize >= 4:
        return lax.psum(x, axis)
    wide = lax.psum(x.astype(jnp.float32), axis)
    return lax.pcast(wide, (axis,), to="varying").astype(x.dtype)
