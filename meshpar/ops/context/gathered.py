"""All-gather attention: each device gathers all keys and values of its sequences.

The simplest form: one collective a layer, and one for its gradient.
"""

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.layouts.axes import CONTEXT
from meshpar.mesh.platform import TPU, traced_platform
from meshpar.ops.attention_kernels import DIM_NAMES, splash, splash_fits
from meshpar.ops.context.exchange import exchanged, num_ranks, record, widened
from meshpar.ops.context.positions import positions, positions_on
from meshpar.ops.kernels import on_shards

_DIM = 2
"""The length in stacked keys and values [2, B, L, K, H]."""


def gathered_attention(q_BLNH: Array, k_BLKH: Array, v_BLKH: Array) -> Array:
    """Causal attention of this device's queries to all keys before them.

    Communication: an all_gather of keys and values, (n-1)/n of their whole bytes; a
    reduce_scatter of their gradients, the same.

    Args:
      q_BLNH: queries of this device's tokens, any float dtype.
      k_BLKH: their keys.
      v_BLKH: their values.
    """
    kv = _gather(jnp.stack([k_BLKH, v_BLKH]))
    if traced_platform() is TPU and splash_fits(q_BLNH):
        return on_shards(_splash, DIM_NAMES, q_BLNH, *kv)
    keys = jnp.concatenate(
        [positions_on(rank, k_BLKH.shape[1]) for rank in range(num_ranks())]
    )
    is_seen_LM = positions(q_BLNH.shape[1])[:, None] >= keys[None]
    return jax.nn.dot_product_attention(
        q_BLNH, *kv, mask=is_seen_LM[None, None], implementation="xla"
    )


def _splash(q_BLNH: Array, k_BLKH: Array, v_BLKH: Array) -> Array:
    return splash(q_BLNH, k_BLKH, v_BLKH, lax.axis_index(CONTEXT))


def _gather(kv: Array) -> Array:
    """Keys and values of all devices: [2, B, L, K, H]."""
    wide, num = widened(kv), num_ranks()
    why = "keys and values of whole sequences"
    record("all_gather", wide, why, num, has_gradient=False)
    record("reduce_scatter", wide, f"gradients of {why}", num, in_backward=True)

    def gather(x: Array) -> Array:
        return lax.all_gather(x, CONTEXT, axis=_DIM, tiled=True)

    def scatter(x: Array) -> Array:
        return lax.psum_scatter(x, CONTEXT, scatter_dimension=_DIM, tiled=True)

    return exchanged(wide, gather, scatter).astype(kv.dtype)
