"""Checksums of tensors: equal on every layout, different after a change of any bit.

A checksum is a sum over the elements, modulo 2**32, of a hash of each element's bits
and position. A sum does not depend on order, so shards of any mesh add up to the same
number. At one position the hash is a bijection of the bits, so a change of a single
element always changes the checksum; other changes go unseen with probability 2**-32.

Source (the hash): Appleby, MurmurHash3, the finalizer of 32 bits.
"""

import functools
import json
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshpar.arrays import leaves_by_path, to_device

CHECKSUMS = "checksums"
"""Key of the checksums in the metadata of a checkpoint."""
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


def _checksum(x: jax.Array, start: Any = (), shape: tuple[int, ...] = ()) -> jax.Array:
    """The checksum of a block of an array of some shape; of a whole one by default."""
    bits = _bits(x)
    start, shape = (*(start or [0] * x.ndim), 0), (*(shape or x.shape), bits.shape[-1])
    position = jnp.zeros(bits.shape, jnp.uint32)
    for dim in range(bits.ndim):
        stride = np.uint32(math.prod(shape[dim + 1 :]) % 2**32)
        place = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
        position += (place + jnp.uint32(start[dim])) * stride
    mixed = bits ^ (position * np.uint32(_MIX))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        mixed = (mixed ^ (mixed >> np.uint32(shift))) * np.uint32(factor)
    return jnp.sum(mixed ^ (mixed >> np.uint32(16)), dtype=jnp.uint32)


_of_block = jax.jit(_checksum, static_argnums=2)


@functools.cache
def _program(replicated: NamedSharding) -> Callable[[list[jax.Array]], jax.Array]:
    def leaf_checksums(leaves: list[jax.Array]) -> jax.Array:
        return jnp.stack([_of_block(to_device(x)) for x in leaves])

    return jax.jit(leaf_checksums, out_shardings=replicated)


def checksums(tree: Any) -> list[int]:
    """The checksum of every leaf, in the tree's order; all processes call it.

    Args:
      tree: arrays on one mesh.
    """
    if not (leaves := jax.tree.leaves(tree)):
        return []
    replicated = NamedSharding(leaves[0].sharding.mesh, PartitionSpec())
    return np.asarray(_program(replicated)(leaves)).tolist()


def checksum_of_block(
    x: np.ndarray, index: tuple[slice, ...], shape: tuple[int, ...]
) -> int:
    """The part of an array's checksum that a block of it has; modulo 2**32 they add up.

    Args:
      x: the block.
      index: its place in the array.
      shape: of the array.
    """
    return int(_of_block(x, [np.uint32(dim.start) for dim in index], shape))


def json_checksum(value: Any) -> int:
    """The CRC-32 of a value's JSON text, with sorted keys."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def changed_tensor(state: Any, extra: Any, metadata: Mapping[str, Any]) -> str:
    """The first tensor whose checksum has changed; "" if none. All processes call it.

    Args:
      state: the restored state, in the layout of replicas that was saved.
      extra: the restored extra state, or None to leave it out.
      metadata: the metadata saved with them; the first format has no checksums.
    """
    saved = metadata.get(CHECKSUMS, ([], []))
    for tree, tree_checksums in zip((state, extra), saved, strict=True):
        if not tree_checksums or tree is None:
            continue
        for path, now, then in zip(
            leaves_by_path(tree), checksums(tree), tree_checksums, strict=True
        ):
            if now != then:
                return f"{path} has changed since it was written"
    return ""
