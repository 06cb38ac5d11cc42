"""Global flat indices of the elements that one part of a batch holds, in 64 bits.

Random numbers that are drawn by counter follow from these indices (`shard_keys`).
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from meshpar.arrays import Array
from meshpar.layouts.token_order import positions_on

Split = tuple[int, str]
"""(number of shards, order) of a dim."""

Words = tuple[Array, Array]
"""The upper and lower 32 bits of 64-bit integers."""


def indices(
    words: Sequence[Array],
    shape: tuple[int, ...],
    per_row: int,
    inner: tuple[Split, ...],
) -> Words:
    """Global flat indices of a part's elements.

    They are sums over dims, so that the compiler may shard any of them.

    Args:
      words: the first row, the step from row to row, and the shard number of each dim
        of `inner`.
      shape: of the draw.
      per_row: entries per row in the first dim; 0 if it belongs to no rows.
      inner: how the dims after the first are split.
    """
    split = inner[: max(len(shape) - 1, 0)]
    nums = [1, *(num for num, _ in split)] + [1] * (len(shape) - 1 - len(split))
    strides = [
        math.prod(shape[d + 1 :]) * math.prod(nums[d + 1 :]) for d in range(len(shape))
    ]
    zeros = jnp.zeros(shape, jnp.uint32)
    index = zeros, zeros
    if shape:
        index = _spread(_places(words, shape[0], per_row, strides[0]), shape, 0)
    for dim, (num, order) in enumerate(split, 1):
        place = positions_on(order, words[1 + dim], num, shape[dim])
        index = _sum(index, _spread(_product(place, strides[dim]), shape, dim))
    offset = zeros
    for dim in range(1 + len(split), len(shape)):
        place = jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
        offset += place * jnp.uint32(strides[dim])
    return (
        _sum(index, (jnp.uint32(0), offset)) if len(shape) > 1 + len(split) else index
    )


def _places(words: Sequence[Array], size: int, per_row: int, stride: int) -> Words:
    """The number of the first element of each entry of the first dim."""
    entry = jax.lax.iota(jnp.uint32, size)
    if not per_row:
        return _product(entry, stride)
    row = entry if per_row == 1 else entry // jnp.uint32(per_row)
    first, step, *_ = words
    start = _product(first + row * step, per_row * stride)
    if per_row == 1:
        return start
    return _sum(start, _product(entry % jnp.uint32(per_row), stride))


def _spread(words: Words, shape: tuple[int, ...], dim: int) -> Words:
    high, low = (jax.lax.broadcast_in_dim(w, shape, (dim,)) for w in words)
    return high, low


def _product(a: Array, b: int) -> Words:
    """The product of a uint32 and a static int below 2**64, modulo 2**64."""
    upper, lower = divmod(b, 2**32)
    high = _high_word(a, lower) + a * jnp.uint32(upper)
    return high, a * jnp.uint32(lower)


def _sum(a: Words, b: Words) -> Words:
    """The sum of two 64-bit integers, modulo 2**64."""
    low = a[1] + b[1]
    return a[0] + b[0] + (low < a[1]).astype(jnp.uint32), low


def _high_word(a: Array, size: int) -> Array:
    """The upper 32 bits of the product of a uint32 and an int below 2**32."""
    a_low, a_high = a & 0xFFFF, a >> 16
    b_low, b_high = jnp.uint32(size & 0xFFFF), jnp.uint32(size >> 16)
    middle = a_high * b_low + ((a_low * b_low) >> 16)
    carry = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (carry >> 16)
