"""Random keys whose draws inside shard_map are shards of one global draw.

A model draws noise (dropout) in the shape of the activations that it sees. Those are
global under `jit`, but one shard of the batch under `shard_map`, where the same key
would give every shard the same noise. A key of `for_shard` carries the number of its
shard: its draw of shape [b, ...] is rows shard*b to (shard+1)*b of the draw of shape
[B, ...] by the plain key. Dims after the first, such as the length, can be split as
well. So the noise does not depend on the mesh.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import random as extend_random

from meshpar.arrays import Array
from meshpar.errors import MeshparError
from meshpar.layouts.token_order import CONTIGUOUS, positions_on

_PLAIN = "threefry2x32"

Split = tuple[int, str]
"""(number of shards, order) of a dim."""

Words = tuple[Array, Array]
"""The upper and lower 32 bits of 64-bit integers."""


class Inner(NamedTuple):
    """How a dim after the first is split.

    Attributes:
      shard: number of this shard, integer scalar; may vary inside shard_map.
      num: number of shards.
      order: which elements each shard has, as in `layouts.token_order`.
    """

    shard: Array
    num: int
    order: str = CONTIGUOUS


def for_shard(key: Array, shard: Array, *inner: Inner) -> Array:
    """Makes a key that draws one shard of the plain key's draws.

    A draw of shape [b, l, ...] has the numbers that the plain key's draw of the global
    shape has at this shard's places: rows from shard * b on, and l places of the next
    dim by their order. A draw with fewer dims is not split by the missing ones. Draws
    must have the dims of the batch in front: others (one number for the whole batch)
    differ between shards, so make them from the plain key.

    Args:
      key: a threefry key, scalar.
      shard: number of this shard of the first dim, integer scalar; may vary inside
        shard_map.
      *inner: how each dim after the first is split; one splits the second dim, two the
        second and third.

    Raises:
      MeshparError: the key is of another kind, or a draw has 2**32 elements or more on
        a shard (raised by the draw).

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011
      (threefry: numbers by counter, so any slice can be drawn alone).
    """
    if (kind := jax.random.key_impl(key)) != _PLAIN:
        raise MeshparError(
            f"a key of kind {kind}: only {_PLAIN} keys can be split into shards; leave "
            "jax_default_prng_impl at its default"
        )
    shards = (shard, *(dim.shard for dim in inner))
    data = _with_shards(key, [number.astype(jnp.uint32) for number in shards])
    impl = _impl(tuple((dim.num, dim.order) for dim in inner))
    return jax.random.wrap_key_data(data, impl=impl)


def for_part(key: Array, part: Array, num: int) -> Array:
    """The key of one part of a shard's rows.

    Args:
      key: of the shard, by `for_shard`; or a plain key, of the whole.
      part: number of the part, integer scalar; may vary inside shard_map.
      num: number of parts.
    """
    if (impl := jax.random.key_impl(key)) == _PLAIN:
        return for_shard(key, part)
    data = jax.random.key_data(key)
    shard = data[2] * jnp.uint32(num) + part.astype(jnp.uint32)
    data = jnp.concatenate([data[:2], shard[None], data[3:]])
    return jax.random.wrap_key_data(data, impl=impl)


@functools.cache
def _impl(splits: tuple[Split, ...]) -> Any:
    """The kind of key whose dims after the first are split so.

    Its data are the two words of the plain key and the shard number of each split dim.
    """
    num_split = 1 + len(splits)
    suffix = "".join(f"_{num}{order}" for num, order in splits)
    return extend_random.define_prng_impl(
        key_shape=(2 + num_split,),
        seed=lambda seed: _with_shards(
            jax.random.key(seed, impl=_PLAIN), [jnp.uint32(0)] * num_split
        ),
        split=_split,
        random_bits=functools.partial(_random_bits, splits=splits),
        fold_in=_fold_in,
        name=f"meshpar_sharded_threefry{suffix}",
        tag=f"mpsh{suffix}",
    )


def _plain_key(data: Array) -> Array:
    return jax.random.wrap_key_data(data[:2], impl=_PLAIN)


def _with_shards(keys: Array, shards: list[Array]) -> Array:
    data = jax.random.key_data(keys)
    columns = [jnp.broadcast_to(shard, (*data.shape[:-1], 1)) for shard in shards]
    return jnp.concatenate([data, *columns], axis=-1)


def _shards(data: Array) -> list[Array]:
    return [data[i] for i in range(2, len(data))]


def _split(data: Array, shape: tuple[int, ...]) -> Array:
    return _with_shards(jax.random.split(_plain_key(data), shape), _shards(data))


def _fold_in(data: Array, number: Array) -> Array:
    return _with_shards(jax.random.fold_in(_plain_key(data), number), _shards(data))


def _random_bits(
    data: Array, bit_width: int, shape: tuple[int, ...], splits: tuple[Split, ...]
) -> Array:
    """Partitionable threefry: the bits of an element follow from its global index."""
    if math.prod(shape) >= 2**32:
        raise MeshparError(
            f"a draw of shape {shape} has 2**32 elements or more on a shard; draw it "
            "in parts, or use more shards"
        )
    if split := splits[: max(len(shape) - 1, 0)]:
        high, low = _block_indices(data, shape, split)
    else:
        high, low = _row_indices(data, shape)
    key = (jnp.broadcast_to(data[i], shape) for i in range(2))
    first, second = extend_random.threefry2x32_p.bind(*key, high, low)
    if bit_width == 64:
        wide = first.astype(jnp.uint64) << jnp.uint64(32)
        return wide | second.astype(jnp.uint64)
    return (first ^ second).astype(jnp.dtype(f"uint{bit_width}"))


def _row_indices(data: Array, shape: tuple[int, ...]) -> Words:
    """Global flat indices of a shard whose first dim alone is split."""
    # The index is a sum over dims, so that the compiler may shard any of them.
    size = math.prod(shape)
    index, stride = jnp.zeros(shape, jnp.uint32), size
    for dim, length in enumerate(shape):
        stride //= max(length, 1)
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
    start = data[2] * jnp.uint32(size)
    low = start + index
    high = _high_word(data[2], size) + (low < start).astype(jnp.uint32)
    return high, low


def _block_indices(
    data: Array, shape: tuple[int, ...], splits: tuple[Split, ...]
) -> Words:
    """Global flat indices of a shard that is split along the first dims."""
    rest = [(1, CONTIGUOUS)] * (len(shape) - 1 - len(splits))
    nums, orders = zip((0, CONTIGUOUS), *splits, *rest, strict=True)
    stride = math.prod(shape) // max(shape[0], 1) * math.prod(nums[1:])
    index = jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32)
    for dim, length in enumerate(shape):
        rank = data[2 + dim] if dim <= len(splits) else jnp.uint32(0)
        place = positions_on(orders[dim], rank, nums[dim], length)
        words = _product(place, stride)
        index = _sum(index, [jax.lax.broadcast_in_dim(w, shape, (dim,)) for w in words])
        if dim + 1 < len(shape):
            stride //= max(shape[dim + 1], 1) * nums[dim + 1]
    return index


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
