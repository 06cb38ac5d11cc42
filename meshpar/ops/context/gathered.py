"""All-gather attention: each device gathers all keys and values of its sequences.

The simplest form: a collective for keys and one for values a layer, and one each for
their gradients. Where the steps of a ring hide behind compute, a few heads at a time:
the keys of the next ones travel beside the attention of those before.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshpar.arrays import Array
from meshpar.collectives.transport import (
    ONE_SHOT,
    Transports,
    transports_for,
)
from meshpar.layouts.axes import CONTEXT
from meshpar.layouts.remat import ATTENTION
from meshpar.layouts.token_order import ZIGZAG, device_order, in_natural_order
from meshpar.mesh.platform import TPU, traced_platform
from meshpar.ops.attention_kernels import (
    LANES,
    SEGMENT_NAMES,
    splash,
    splash_by_heads,
    splash_fits,
)
from meshpar.ops.attention_mask import Tokens, is_seen
from meshpar.ops.context.exchange import (
    exchanged,
    head_ways,
    num_ranks,
    scope_in_use,
    whole_segments,
    widened,
)
from meshpar.ops.context.positions import positions

_LENGTH, _HEADS = 1, 2
"""Dims of queries [B, L, N, H], and of keys and values [B, L, K, H]."""

_GROUPS = 4
"""Most groups of heads whose keys are gathered one after another."""

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
    transports = transports_for(scope_in_use().mesh, (CONTEXT,))
    ways, num, heads = 1, 1, k_BLKH.shape[_HEADS]
    if transports.gradients is not ONE_SHOT:
        ways = head_ways(scope_in_use())
        num = next(n for n in (_GROUPS, 2, 1) if heads // ways % n == 0)
    segments = None
    if segments_BL is not None:
        segments = segments_BL, _natural(whole_segments(segments_BL), 1)

    def attend(q: Array, *kv: Array) -> Array:
        # Apart: of both in one array TPUs make copies in other orders.
        whole = (_gather(x, transports) for x in kv)
        return _attend(q, *whole, segments, window)

    groups = (_groups(x, ways, num) for x in (q_BLNH, k_BLKH, v_BLKH))
    once = jax.jit(attend)  # All groups are traced and differentiated as one.
    return _joined([once(*one) for one in zip(*groups, strict=True)], ways)


def _attend(
    q: Array,
    k: Array,
    v: Array,
    segments: tuple[Array, Array] | None,
    window: int,
) -> Array:
    """Attention of this device's queries to whole sequences in their own order."""
    order, whole = scope_in_use().layout.token_order, k.shape[_LENGTH]
    if traced_platform() is not TPU or not splash_fits(q):
        own, all_keys = segments or (None, None)
        queries = Tokens(positions(q.shape[_LENGTH]), own)
        keys = Tokens(jnp.arange(whole), all_keys)
        y = _by_blocks(q, k, v, queries, keys, window)
        return checkpoint_name(y, ATTENTION)
    places = device_order(order, whole, num_ranks())
    run = functools.partial(_splash, window=window, places=places)
    others = [(x, SEGMENT_NAMES) for x in segments or ()]
    return splash(run, q, k, v, others=others)


def _splash(*arrays: Array, **options: Any) -> Array:
    return splash_by_heads(*arrays, part=lax.axis_index(CONTEXT), **options)


def _by_blocks(
    q_BLNH: Array, k: Array, v: Array, queries: Tokens, keys: Tokens, window: int
) -> Array:
    """Attention in plain jnp, at most `_BLOCK` queries at a time."""

    def block(q_BCNH: Array, queries: Tokens) -> Array:
        mask = is_seen(queries, keys, window)[:, None]
        return jax.nn.dot_product_attention(
            q_BCNH, k, v, mask=mask, implementation="xla"
        )

    length = q_BLNH.shape[_LENGTH]
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


def _natural(x: Array, dim: int) -> Array:
    """Tokens of all devices in the order of their sequences."""
    return in_natural_order(x, scope_in_use().layout.token_order, num_ranks(), dim)


def _groups(x: Array, ways: int, num: int) -> list[Array]:
    """Groups of neighbouring heads, out of each of the `ways` parts of the heads."""
    if num == 1:
        return [x]
    *rest, heads, head_dim = x.shape
    parts = x.reshape(*rest, ways, num, heads // ways // num, head_dim)
    return [parts[..., i, :, :].reshape(*rest, -1, head_dim) for i in range(num)]


def _joined(groups: Sequence[Array], ways: int) -> Array:
    """The inverse of `_groups`."""
    if len(groups) == 1:
        return groups[0]
    *rest, heads, head_dim = groups[0].shape
    parts = [x.reshape(*rest, ways, heads // ways, head_dim) for x in groups]
    return jnp.stack(parts, axis=-3).reshape(*rest, -1, head_dim)


def _gather(x_BLKH: Array, transports: Transports) -> Array:
    """Keys or values of whole sequences in their own order: [B, M, K, H].

    Rings bring each half of a part to its place. After one collective, TPUs copy whole
    keys into other orders until they are in their own, which takes longer than to send
    them.
    """
    axes, transport = (CONTEXT,), transports.gradients
    order, num = scope_in_use().layout.token_order, num_ranks()
    natural = functools.partial(in_natural_order, order=order, num=num, dim=_LENGTH)

    def gather(x: Array) -> Array:
        if order == ZIGZAG and transport.covers(axes):
            return transport.all_gather(x, axes, _LENGTH, folded=True)
        return natural(transport.all_gather(x, axes, _LENGTH))

    def scatter(dy: Array) -> Array:
        if order == ZIGZAG and transport.covers(axes):
            return transport.reduce_scatter(dy, axes, _LENGTH, folded=True)
        (dy,) = jax.linear_transpose(natural, dy)(dy)
        return transport.reduce_scatter(dy, axes, _LENGTH)

    moves, why = map(_dense, (gather, scatter)), "keys and values of whole sequences"
    return exchanged(widened(x_BLKH), *moves, why).astype(x_BLKH.dtype)


def _dense(move: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A move of [B, L, K, H] as one of [B, L, K*H] where TPUs would pad each head.

    Wider heads stay as kernels read them.
    """

    def run(x: Array) -> Array:
        *_, heads, head_dim = x.shape
        if head_dim % LANES == 0:
            return move(x)
        y = move(x.reshape(*x.shape[:_HEADS], heads * head_dim))
        return y.reshape(*y.shape[:_HEADS], heads, head_dim)

    return run
