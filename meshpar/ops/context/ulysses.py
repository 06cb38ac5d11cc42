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
    record,
    widened,
)

_LENGTH, _HEADS = 1, 2


def ulysses_attention(q_BLNH: Array, k_BLKH: Array, v_BLKH: Array) -> Array:
    """Causal attention of whole sequences, each device with its part of the heads.

    Communication: all_to_alls of queries, keys, values and outputs, (n-1)/n of this
    device's bytes each, and of their gradients. Fewer key heads than devices are
    repeated before they are sent.

    Args:
      q_BLNH: queries of this device's tokens, any float dtype.
      k_BLKH: their keys.
      v_BLKH: their values.

    Raises:
      LayoutError: the heads do not divide over the devices.
    """
    num, others = num_ranks(), head_ways()
    heads, kv_heads = q_BLNH.shape[_HEADS] // others, k_BLKH.shape[_HEADS] // others
    if heads % num:
        raise LayoutError(
            f"context_mode=ulysses: heads={heads * others} does not divide over "
            f"{CONTEXT}={num}{f' times {others} ways' if others > 1 else ''}; use "
            "context_mode=allgather, or another size"
        )
    repeats = math.lcm(kv_heads, num) // kv_heads
    k_BLKH, v_BLKH = (jnp.repeat(x, repeats, axis=_HEADS) for x in (k_BLKH, v_BLKH))
    sent = (
        _swapped(x, _HEADS, _LENGTH, name)
        for x, name in ((q_BLNH, "queries"), (k_BLKH, "keys"), (v_BLKH, "values"))
    )
    return _swapped(by_platform(*sent), _LENGTH, _HEADS, "outputs of attention")


def _swapped(x: Array, split: int, join: int, why: str) -> Array:
    """Splits one dim over the devices, and joins another one."""
    wide = widened(x)
    record("all_to_all", wide, why)

    def swap(x: Array) -> Array:
        return lax.all_to_all(x, CONTEXT, split, join, tiled=True)

    def swap_back(x: Array) -> Array:
        return lax.all_to_all(x, CONTEXT, join, split, tiled=True)

    return exchanged(wide, swap, swap_back).astype(x.dtype)
