"""RMSNorm over several dims at once, such as all heads, which devices may split."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.contracts.purposes import purpose
from meshpar.layouts.scope import activation_axes, current_scope
from meshpar.ops.kernels import on_shards


def rms_normalized(x: Array, names: Sequence[str], num: int, eps: float) -> Array:
    """Divides x by the root of its mean square over its last dims.

    Communication: over axes that split these dims one all_reduce of a number for each
    token, and two backward.

    Args:
      x: float array.
      names: of its dims.
      num: number of the dims to normalize over.
      eps: added to the mean square.

    Raises:
      LayoutError: a dim that does not divide over its axes.

    Source: Zhang and Sennrich, arXiv:1910.07467.
    """
    dims, size = tuple(range(-num, 0)), math.prod(x.shape[-num:])
    scope = current_scope()
    split = () if scope is None else activation_axes(scope, names, "rms_normalized")
    axes = tuple(axis for axes in split[-num:] for axis in axes)

    def normalized(x: Array) -> Array:
        total = jnp.sum(jnp.square(x), dims, keepdims=True)
        if axes:
            with purpose("sums of norms over the heads"):
                total = lax.psum(total, axes)
        return x * lax.rsqrt(total / size + eps)

    return on_shards(normalized, names, x) if axes else normalized(x)
