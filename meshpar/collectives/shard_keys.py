"""Random keys whose draws inside shard_map are the rows of one global draw.

A model draws noise (dropout) in the shape of the activations that it sees. Under
`jit` those are global, under `shard_map` they are one shard of the batch, and the same
key would give every shard the same noise. A key made by `for_shard` carries the number
of its shard: a draw of shape [b, ...] is rows shard*b to (shard+1)*b of the draw of
shape [B, ...] that the plain key would give. So the numbers do not depend on the mesh.
"""

import math

import jax
import jax.numpy as jnp
from jax.extend import random as extend_random

from meshpar.arrays import Array


def _threefry(data: Array) -> Array:
    return jax.random.wrap_key_data(data[:2], impl="threefry2x32")


def _with_shard(keys: Array, shard: Array) -> Array:
    data = jax.random.key_data(keys)
    shard = jnp.broadcast_to(shard, (*data.shape[:-1], 1))
    return jnp.concatenate([data, shard], axis=-1)


def _split(data: Array, shape: tuple[int, ...]) -> Array:
    return _with_shard(jax.random.split(_threefry(data), shape), data[2])


def _fold_in(data: Array, number: Array) -> Array:
    return _with_shard(jax.random.fold_in(_threefry(data), number), data[2])


def _random_bits(data: Array, bit_width: int, shape: tuple[int, ...]) -> Array:
    """Partitionable threefry: the bits of an element follow from its flat index."""
    size = math.prod(shape)
    if size >= 2**32:
        raise ValueError(
            f"a draw of shape {shape} has 2**32 elements or more on a shard"
        )
    # Flat 64-bit indices in two words, dim by dim, so that any dim may be sharded.
    index, stride = jnp.zeros(shape, jnp.uint32), size
    for dim, length in enumerate(shape):
        stride //= max(length, 1)
        index += jax.lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
    start = data[2] * jnp.uint32(size)
    low = start + index
    high = _high_word(data[2], size) + (low < start).astype(jnp.uint32)
    key = (jnp.broadcast_to(data[i], shape) for i in range(2))
    first, second = extend_random.threefry2x32_p.bind(*key, high, low)
    if bit_width == 64:
        wide = first.astype(jnp.uint64) << jnp.uint64(32)
        return wide | second.astype(jnp.uint64)
    return (first ^ second).astype(jnp.dtype(f"uint{bit_width}"))


def _high_word(a: Array, size: int) -> Array:
    """The upper 32 bits of the product of a uint32 and an int below 2**32."""
    a_low, a_high = a & 0xFFFF, a >> 16
    b_low, b_high = jnp.uint32(size & 0xFFFF), jnp.uint32(size >> 16)
    middle = a_high * b_low + ((a_low * b_low) >> 16)
    carry = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (carry >> 16)


_SHARDED = extend_random.define_prng_impl(
    key_shape=(3,),
    seed=lambda seed: _with_shard(
        jax.random.key(seed, impl="threefry2x32"), jnp.uint32(0)
    ),
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="meshpar_sharded_threefry",
    tag="mpsh",
)


def for_shard(key: Array, shard: Array) -> Array:
    """A key whose draws are one shard of the plain key's draws along the first dim.

    Draws that have no batch dim in front (one number for the whole batch) would differ
    between shards: make them from a key of their own.

    Args:
      key: a threefry key, scalar.
      shard: number of this shard of the batch, uint32 scalar; may vary inside
        shard_map.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011
      (threefry: numbers by counter, so any slice can be drawn alone).
    """
    data = _with_shard(key, shard.astype(jnp.uint32))
    return jax.random.wrap_key_data(data, impl=_SHARDED)
