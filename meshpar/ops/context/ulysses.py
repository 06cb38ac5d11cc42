"""Ulysses attention: whole sequences of some heads in place of parts of all heads.

Source: Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
"""

import math

import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.errors import LayoutError
from meshpar.layouts.axes import CONTEXT
from meshpar.ops.attention_kernels import by_platform
from meshpar.ops.context.exchange import (
    exchanged,
    head_ways,
    num_ranks,
    scope_in_use,
    whole_segments,
    widened,
)

_LENGTH, _HEADS = 1, 2


def ulysses_attention(
    q_BLNH: Array, k_BLKH: Array, v_BLKH: Array, segments_BL: Array | None, window: int
) -> Array:
    """Causal attention of whole sequences, each device with its part of the heads.

    Communication: all_to_alls of queries, keys, values and outputs, (n-1)/n of this
    device's bytes each, and of their gradients. Fewer key heads than devices are
    repeated before they are sent.

    Args:
      q_BLNH: queries of this device's tokens, any float dtype.
      k_BLKH: their keys.
      v_BLKH: their values.
      segments_BL: numbers of their documents, or None.
      window: as in `by_platform`.

    Raises:
      LayoutError: the heads do not divide over the devices.
    """
    num = num_ranks()
    q, kv = split_heads(q_BLNH, k_BLKH, v_BLKH, num)
    if segments_BL is not None:
        segments_BL = whole_segments(segments_BL)
    return join_heads(by_platform(q, *kv, segments_BL, window), num)


def split_heads(
    q_BLNH: Array, k_BLKH: Array, v_BLKH: Array, num: int
) -> tuple[Array, Array]:
    """(queries, keys and values) of some heads and of all tokens of some neighbours.

    Args:
      q_BLNH: queries of this device's tokens.
      k_BLKH: their keys.
      v_BLKH: their values.
      num: neighbours along `context` that exchange heads; 1 for none.

    Returns:
      q[B, num*L, N/num, H] and kv[2, B, num*L, K', H], K' = lcm(K, num) / num.

    Raises:
      LayoutError: the heads do not divide over the neighbours.
    """
    if num == 1:
        return q_BLNH, jnp.stack([k_BLKH, v_BLKH])
    others = head_ways(scope_in_use())
    heads, kv_heads = q_BLNH.shape[_HEADS] // others, k_BLKH.shape[_HEADS] // others
    if heads % num:
        raise LayoutError(
            f"heads={heads * others} does not divide over the {num} devices along "
            f"{CONTEXT} that split heads{f' times {others} ways' if others > 1 else ''}"
            "; use context_mode=allgather, or other sizes"
        )
    repeats = math.lcm(kv_heads, num) // kv_heads
    k_BLKH, v_BLKH = (jnp.repeat(x, repeats, axis=_HEADS) for x in (k_BLKH, v_BLKH))
    q, k, v = (
        _swapped(x, _HEADS, _LENGTH, num, name)
        for x, name in ((q_BLNH, "queries"), (k_BLKH, "keys"), (v_BLKH, "values"))
    )
    return q, jnp.stack([k, v])


def join_heads(y_BLNH: Array, num: int) -> Array:
    """All heads of this device's tokens: the inverse of `split_heads`.

    Args:
      y_BLNH: [B, num*L, N/num, H].
      num: as in `split_heads`.
    """
    if num == 1:
        return y_BLNH
    return _swapped(y_BLNH, _LENGTH, _HEADS, num, "outputs of attention")


def _swapped(x: Array, split: int, join: int, num: int, why: str) -> Array:
    """Splits one dim over neighbours, and joins another one."""
    wide, ranks = widened(x), range(num_ranks())
    groups = [list(ranks[i : i + num]) for i in ranks[::num]]
    options = dict(tiled=True, axis_index_groups=groups if len(groups) > 1 else None)

    def swap(x: Array) -> Array:
        return lax.all_to_all(x, CONTEXT, split, join, **options)

    def swap_back(x: Array) -> Array:
        return lax.all_to_all(x, CONTEXT, join, split, **options)

    return exchanged(wide, swap, swap_back, why).astype(x.dtype)
