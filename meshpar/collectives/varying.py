"""Marks arrays as varying over manual mesh axes."""

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.mesh.platform import traced_platform


def vary(x: Array, axes: tuple[str, ...]) -> Array:
    """Marks an array as varying over manual axes, so that a vjp adds no psum for it."""
    missing = frozenset(axes) - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def sum_varying(x: Array, axis: str) -> Array:
    """Sums an array over a manual axis; both ways in float32 on CPUs.

    XLA:CPU aborts on sums of smaller floats beside automatic axes.
    """
    if not traced_platform().widens_collectives or x.dtype.itemsize >= 4:
        return lax.psum(x, axis)
    wide = lax.psum(x.astype(jnp.float32), axis)
    return lax.pcast(wide, (axis,), to="varying").astype(x.dtype)
