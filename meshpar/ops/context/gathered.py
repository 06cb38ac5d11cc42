"""All-gather attention: each device gathers all keys and values of its sequences.

The simplest form: one collective a layer, and one for its gradient.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.layouts.axes import CONTEXT
from meshpar.layouts.token_order import device_order, in_natural_order
from meshpar.mesh.platform import TPU, traced_platform
from meshpar.ops.attention_kernels import (
    DIM_NAMES,
    SEGMENT_NAMES,
    splash,
    splash_fits,
)
from meshpar.ops.attention_mask import Tokens, is_seen
from meshpar.ops.context.exchange import (
    exchanged,
    num_ranks,
    record,
    scope_in_use,
    whole_segments,
    widened,
)
from meshpar.ops.context.positions import positions
from meshpar.ops.kernels import on_shards

_DIM = 2
"""The length in stacked keys and values [2, B, L, K, H]."""

_BLOCK = 1024
"""Most queries whose scores are in memory at once, without a kernel."""


def gathered_attention(
    q_BLNH: Array, k_BLKH: Array, v_BLKH: Array, segments_BL: Array | None, window: int
) -> Array:
    """Causal attention of this device's queries to all keys before them.

    Communication: an all_gather of keys and values, (n-1)/n of their whole bytes; a
    reduce_scatter of their gradients, the same.

    Args:
      q_BLNH: queries of this device's tokens, any float dtype.
      k_BLKH: their keys.
      v_BLKH: their values.
      segments_BL: numbers of their documents, or None.
      window: as in `is_seen`.
    """
    order, num = scope_in_use().layout.token_order, num_ranks()
    k, v = in_natural_order(_gather(jnp.stack([k_BLKH, v_BLKH])), order, num, _DIM)
    all_segments = None
    if segments_BL is not None:
        all_segments = in_natural_order(whole_segments(segments_BL), order, num, 1)
    if traced_platform() is not TPU or not splash_fits(q_BLNH):
        places = positions(q_BLNH.shape[1])
        queries, keys = Tokens(places, segments_BL), jnp.arange(k.shape[1])
        return _by_blocks(q_BLNH, k, v, queries, Tokens(keys, all_segments), window)
    others = []
    if all_segments is not None:
        others = [(segments_BL, SEGMENT_NAMES), (all_segments, SEGMENT_NAMES)]
    places = device_order(order, k.shape[1], num)
    run = functools.partial(_splash, window=window, places=places)
    return on_shards(run, DIM_NAMES, q_BLNH, k, v, others=others)


def _splash(*arrays: Array, **options: Any) -> Array:
    return splash(*arrays, part=lax.axis_index(CONTEXT), **options)


def _by_blocks(
    q_BLNH: Array, k: Array, v: Array, queries: Tokens, keys: Tokens, window: int
) -> Array:
    """Attention in plain jnp, at most `_BLOCK` queries at a time."""

    def block(q_BCNH: Array, queries: Tokens) -> Array:
        mask = is_seen(queries, keys, window)[:, None]
        return jax.nn.dot_product_attention(
            q_BCNH, k, v, mask=mask, implementation="xla"
        )

    length = q_BLNH.shape[1]
    if length <= _BLOCK:
        return block(q_BLNH, queries)
    size = max(size for size in range(1, _BLOCK + 1) if length % size == 0)

    def split(x: Array, dim: int) -> Array:
        parts = x.reshape(*x.shape[:dim], -1, size, *x.shape[dim + 1 :])
        return jnp.moveaxis(parts, dim, 0)

    places, segments = queries
    parts = Tokens(split(places, 0), None if segments is None else split(segments, 1))
    again = jax.checkpoint(block)
    y = lax.map(lambda part: again(*part), (split(q_BLNH, 1), parts))
    return jnp.moveaxis(y, 0, 1).reshape(q_BLNH.shape)


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
