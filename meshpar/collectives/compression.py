"""Compression of averages over replicas: bfloat16, 8 or 4 bits, or top-k.

A lossy compression is a pair of functions: `encode` turns [..., n] into a smaller
array, and `decode` turns it back. A mean is an all_to_all of encoded shards and a local
sum; distributing it is an all_gather of encoded shards. Sums are always in float32.

Source: Douillard et al., Streaming DiLoCo, arXiv:2501.18512, section 2.4 (4 bits);
  Dettmers et al., arXiv:2110.02861 (a scale per block); Stich et al., sparsified SGD,
  arXiv:1809.07599 (top-k).
"""

import dataclasses
import math
import re
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.collectives import patterns
from meshpar.errors import MeshparError
from meshpar.settings import Range

_BLOCK = 256
"""Numbers that share one scale."""

TILE = 32 * 128
"""Elements of one TPU tile, for any dtype.

TPUs turn gathers and reduce_scatters of flat vectors, or of parts of tiles, into
all_reduces (seen with libtpu 0.0.51).
"""


def _rows(x: Array) -> Array:
    """A flat vector as rows of 128, if it consists of whole tiles."""
    return x if len(x) % TILE else x.reshape(-1, 128)


@dataclasses.dataclass(frozen=True)
class Compression:
    """No compression: float32, by reduce_scatter and all_gather. Base of the others.

    Attributes:
      tile: an encoded shard is padded to a multiple of this number of elements.
      block: the length of a shard must be a multiple of this.
      lossy: whether decoded numbers differ from the encoded ones.
    """

    tile: int = 1

    block: ClassVar[int] = 1
    lossy: ClassVar[bool] = False

    def encode(self, x: Array) -> Array:
        """Encodes [..., n] float32 to an array with the same leading dims."""
        return x

    def decode(self, encoded: Array, length: int) -> Array:
        """Decodes to [..., length] float32."""
        del length
        return encoded

    def num_bytes(self, length: int) -> int:
        """Bytes of `length` numbers, encoded and padded."""
        return 4 * length

    def reduce(self, x: Array, axis: str) -> tuple[Array, Array]:
        """The mean over the replicas, scattered; call it inside shard_map.

        Args:
          x: [R * n], float32.
          axis: mesh axis of the replicas.

        Returns:
          This replica's shard [n] of the mean, and x [R * n] as the others decode it.
        """
        mean = patterns.reduce_scatter(_rows(x), axis) / lax.axis_size(axis)
        return mean.reshape(-1), x

    def gather(self, x: Array, axis: str) -> tuple[Array, Array]:
        """Gathers the shards [n] of all replicas; call it inside shard_map.

        Returns:
          All shards [R * n] and this replica's shard [n], both decoded.
        """
        return patterns.all_gather(_rows(x), axis).reshape(-1), x


class _Lossy(Compression):
    """Moves encoded shards, and sums after decoding."""

    lossy: ClassVar[bool] = True

    def reduce(self, x: Array, axis: str) -> tuple[Array, Array]:
        replicas = lax.axis_size(axis)
        length = len(x) // replicas
        encoded = self._padded(self.encode(x.reshape(replicas, length)))
        sent = self.decode(encoded, length).reshape(-1)
        received = patterns.all_to_all(encoded, axis, 0, 0)
        return self.decode(received, length).mean(axis=0), sent

    def gather(self, x: Array, axis: str) -> tuple[Array, Array]:
        encoded = self._padded(self.encode(x))
        received = patterns.all_gather(_rows(encoded), axis).reshape(-1, len(encoded))
        return self.decode(received, len(x)).reshape(-1), self.decode(encoded, len(x))

    def _padded(self, encoded: Array) -> Array:
        padding = [(0, 0)] * (encoded.ndim - 1) + [(0, -encoded.shape[-1] % self.tile)]
        return jnp.pad(encoded, padding)

    def _padded_size(self, elements: int) -> int:
        return -(-elements // self.tile) * self.tile


class _BFloat16(_Lossy):
    """16 bits, moved as integers because XLA:CPU would widen bfloat16 collectives."""

    def encode(self, x: Array) -> Array:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)

    def decode(self, encoded: Array, length: int) -> Array:
        numbers = lax.bitcast_convert_type(encoded[..., :length], jnp.bfloat16)
        return numbers.astype(jnp.float32)

    def num_bytes(self, length: int) -> int:
        return 2 * self._padded_size(length)


@dataclasses.dataclass(frozen=True)
class _Integers(_Lossy):
    """8 or 4 bits per number, then a float32 scale per block, all as bytes."""

    bits: int = 8
    block: ClassVar[int] = _BLOCK

    def encode(self, x: Array) -> Array:
        lead = x.shape[:-1]
        blocks = x.reshape(*lead, -1, _BLOCK)
        largest = 2 ** (self.bits - 1) - 1
        scales = jnp.abs(blocks).max(axis=-1, keepdims=True) / largest
        numbers = jnp.round(blocks / jnp.where(scales == 0, 1, scales))
        numbers = (numbers + largest).astype(jnp.uint8).reshape(x.shape)
        if self.bits == 4:
            pairs = numbers.reshape(*lead, -1, 2)
            numbers = pairs[..., 0] | (pairs[..., 1] << 4)
        scales = lax.bitcast_convert_type(scales[..., 0], jnp.uint8)
        return jnp.concatenate([numbers, scales.reshape(*lead, -1)], axis=-1)

    def decode(self, encoded: Array, length: int) -> Array:
        lead, cut = encoded.shape[:-1], length * self.bits // 8
        end = cut + 4 * length // _BLOCK
        numbers, scales = encoded[..., :cut], encoded[..., cut:end]
        scales = lax.bitcast_convert_type(scales.reshape(*lead, -1, 4), jnp.float32)
        if self.bits == 4:
            numbers = jnp.stack([numbers & 15, numbers >> 4], axis=-1)
        blocks = numbers.reshape(*lead, -1, _BLOCK).astype(jnp.float32)
        blocks = (blocks - (2 ** (self.bits - 1) - 1)) * scales[..., None]
        return blocks.reshape(*lead, length)

    def num_bytes(self, length: int) -> int:
        return self._padded_size(length * self.bits // 8 + 4 * length // _BLOCK)


@dataclasses.dataclass(frozen=True)
class _TopK(_Lossy):
    """The numbers of largest magnitude, then their indices, all as integers."""

    fraction: float = 0.01

    def _count(self, length: int) -> int:
        return max(1, math.ceil(self.fraction * length))

    def encode(self, x: Array) -> Array:
        _, indices = lax.top_k(jnp.abs(x), self._count(x.shape[-1]))
        values = jnp.take_along_axis(x, indices, axis=-1)
        values = lax.bitcast_convert_type(values, jnp.int32)
        return jnp.concatenate([values, indices.astype(jnp.int32)], axis=-1)

    def decode(self, encoded: Array, length: int) -> Array:
        count = self._count(length)
        values, indices = encoded[..., :count], encoded[..., count : 2 * count]
        values = lax.bitcast_convert_type(values, jnp.float32)
        zeros = jnp.zeros((*values.shape[:-1], length), jnp.float32)
        return jnp.put_along_axis(zeros, indices, values, axis=-1, inplace=False)

    def num_bytes(self, length: int) -> int:
        return 4 * self._padded_size(2 * self._count(length))


FORMATS = "f32, bf16, int8, int4 or topk:FRACTION (as in topk:0.01)"
"""The names that `make_compression` knows, for messages."""


def make_compression(text: str, tile: int = 1) -> Compression:
    """The compression that the option `wire=` names.

    Args:
      text: "f32" (none), "bf16", "int8", "int4" or "topk:FRACTION".
      tile: an encoded shard is padded to a multiple of this number of elements.

    Raises:
      MeshparError: an unknown compression.
    """
    known = {
        "f32": Compression(tile),
        "bf16": _BFloat16(tile),
        "int8": _Integers(tile, 8),
        "int4": _Integers(tile, 4),
    }
    if not isinstance(text, str):
        raise MeshparError(f"wire={text!r}: use {FORMATS}")
    if text in known:
        return known[text]
    if match := re.fullmatch(r"topk:(0?\.\d+|1|1\.0)", text):
        if (fraction := float(match.group(1))) > 0:
            return _TopK(tile, fraction)
    raise MeshparError(f"wire={text!r}: use {FORMATS}")


@dataclasses.dataclass(frozen=True)
class Wire(Range):
    """The texts that `make_compression` takes."""

    in_words = FORMATS

    def allows(self, value: Any) -> bool:
        try:
            make_compression(value)
        except MeshparError:
            return False
        return True
