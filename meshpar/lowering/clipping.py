"""Clipping of gradients by their global norm."""

import jax
import jax.numpy as jnp

from meshpar.arrays import Array, Params


def clipped(grads: Params, grad_norm: Array, clip_norm: float | None) -> Params:
    """Gradients scaled down to a norm, if theirs is larger.

    Args:
      grads: {path: gradient}, or parts of them.
      grad_norm: the global norm.
      clip_norm: the largest norm, or None.
    """
    if clip_norm is None:
        return grads
    scale = jnp.minimum(1.0, clip_norm / jnp.maximum(grad_norm, 1e-30))
    return jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
