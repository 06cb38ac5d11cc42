"""A number for every tensor that changes with any of its bits, on any layout.

It is a sum over the elements, modulo 2**32, of a hash of their bits and their place.
The sum does not depend on order, so shards add up to the same on any mesh. At its place
the hash is a bijection of the bits, so no single change of an element goes unseen;
other changes do with a chance of 2**-32.

Source (the hash): Appleby, MurmurHash3, the finalizer of 32 bits.
"""

import functools
import json
import math
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

_MIX = 2654435761  # Knuth's multiplicative hash, odd.


def _bits(x: jax.Array) -> jax.Array:
    """The elements as uint32 [..., words]."""
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    size = x.dtype.itemsize
    if size <= 4:
        unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[size]
        return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)[..., None]
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _one(x: jax.Array) -> jax.Array:
    bits = _bits(x)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for dim in range(bits.ndim):
        stride = np.uint32(math.prod(bits.shape[dim + 1 :]) % 2**32)
        place += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim) * stride
    mixed = bits ^ (place * np.uint32(_MIX))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> np.uint32(16)), dtype=jnp.uint32)


@functools.cache
def _program(whole: NamedSharding) -> Callable[[list[jax.Array]], jax.Array]:
    def numbers(leaves: list[jax.Array]) -> jax.Array:
        return jnp.stack([_one(x) for x in leaves])

    return jax.jit(numbers, out_shardings=whole)


def checksums(tree: Any) -> list[int]:
    """One number for each leaf, in order; all processes call it.

    Args:
      tree: arrays on one mesh.
    """
    if not (leaves := jax.tree.leaves(tree)):
        return []
    whole = NamedSharding(leaves[0].sharding.mesh, PartitionSpec())
    return np.asarray(_program(whole)(leaves)).tolist()


def json_checksum(value: Any) -> int:
    """The checksum of what JSON can say."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
