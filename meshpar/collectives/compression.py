"""Wire formats: how averages over replicas travel, and what of them arrives.

A lossy format is a pair of functions, one way: encode [..., n] to a small array, and
decode it again. A mean is an all_to_all of encoded pieces and a local sum; handing it
out is an all_gather of encoded pieces. Nothing is ever added in a small dtype.

Source: Douillard et al., Streaming DiLoCo, arXiv:2501.18512, section 2.4 (4 bits);
  Dettmers et al., arXiv:2110.02861 (a scale per block); Stich et al., sparsified SGD,
  arXiv:1809.07599 (top-k).
"""

import dataclasses
import math
import re
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from meshpar import collectives
from meshpar.arrays import Array
from meshpar.errors import MeshparError

_BLOCK = 256
"""Numbers that share one scale."""

TILE = 32 * 128
"""Elements of a whole tile on TPUs, of any dtype.

Gathers and reduce_scatters of flat vectors, or of parts of tiles, become all_reduces
there (seen with libtpu 0.0.51).
"""


def _rows(x: Array) -> Array:
    """A flat vector in whole tiles as rows, or as it is."""
    return x if len(x) % TILE else x.reshape(-1, 128)


@dataclasses.dataclass(frozen=True)
class Compression:
    """Float32 as it is, by reduce_scatter and all_gather.

    Attributes:
      tile: elements to whose multiples an encoded piece is padded.
      block: what the length of a piece has to be a multiple of.
      lossy: whether less arrives than was sent.
    """

    tile: int = 1

    block: ClassVar[int] = 1
    lossy: ClassVar[bool] = False

    def encode(self, x: Array) -> Array:
        """[..., n] float32 to an array with the same leading dims."""
        return x

    def decode(self, encoded: Array, length: int) -> Array:
        """The inverse, [..., length] float32."""
        del length
        return encoded

    def num_bytes(self, length: int) -> int:
        """Bytes that stand for `length` numbers."""
        return 4 * length

    def reduce(self, x: Array, axis: str) -> tuple[Array, Array]:
        """The mean over the replicas, inside shard_map.

        Args:
          x: [R * n], float32.
          axis: mesh axis of the replicas.

        Returns:
          This replica's piece [n] of the mean, and [R * n] what of x arrived.
        """
        mean = collectives.reduce_scatter(_rows(x), axis) / lax.axis_size(axis)
        return mean.reshape(-1), x

    def gather(self, x: Array, axis: str) -> tuple[Array, Array]:
        """The pieces [n] of all replicas as they arrive, [R * n], and one's own."""
        return collectives.all_gather(_rows(x), axis).reshape(-1), x


class _Lossy(Compression):
    """Pieces are encoded; sums are taken after decoding."""

    lossy: ClassVar[bool] = True

    def reduce(self, x: Array, axis: str) -> tuple[Array, Array]:
        """As in `Wire`."""
        replicas = lax.axis_size(axis)
        length = len(x) // replicas
        encoded = self._padded(self.encode(x.reshape(replicas, length)))
        sent = self.decode(encoded, length).reshape(-1)
        got = collectives.all_to_all(encoded, axis, 0, 0)
        return self.decode(got, length).mean(axis=0), sent

    def gather(self, x: Array, axis: str) -> tuple[Array, Array]:
        """As in `Wire`."""
        encoded = self._padded(self.encode(x))
        got = collectives.all_gather(_rows(encoded), axis).reshape(-1, len(encoded))
        return self.decode(got, len(x)).reshape(-1), self.decode(encoded, len(x))

    def _padded(self, encoded: Array) -> Array:
        more = [(0, 0)] * (encoded.ndim - 1) + [(0, -encoded.shape[-1] % self.tile)]
        return jnp.pad(encoded, more)

    def _whole(self, elements: int) -> int:
        """Elements of an encoded piece, padded."""
        return -(-elements // self.tile) * self.tile


class _BFloat16(_Lossy):
    """16 bits; as integers, because XLA:CPU would widen bfloat16 collectives."""

    def encode(self, x: Array) -> Array:
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)

    def decode(self, encoded: Array, length: int) -> Array:
        numbers = lax.bitcast_convert_type(encoded[..., :length], jnp.bfloat16)
        return numbers.astype(jnp.float32)

    def num_bytes(self, length: int) -> int:
        return 2 * self._whole(length)


@dataclasses.dataclass(frozen=True)
class _Integers(_Lossy):
    """8 or 4 bits a number, and behind them a float32 scale per block, all as bytes."""

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
        return self._whole(length * self.bits // 8 + 4 * length // _BLOCK)


@dataclasses.dataclass(frozen=True)
class _TopK(_Lossy):
    """The largest numbers of a piece, and behind them their places, as integers."""

    fraction: float = 0.01

    def _count(self, length: int) -> int:
        return max(1, math.ceil(self.fraction * length))

    def encode(self, x: Array) -> Array:
        _, places = lax.top_k(jnp.abs(x), self._count(x.shape[-1]))
        values = jnp.take_along_axis(x, places, axis=-1)
        values = lax.bitcast_convert_type(values, jnp.int32)
        return jnp.concatenate([values, places.astype(jnp.int32)], axis=-1)

    def decode(self, encoded: Array, length: int) -> Array:
        count = self._count(length)
        values, places = encoded[..., :count], encoded[..., count : 2 * count]
        values = lax.bitcast_convert_type(values, jnp.float32)
        zeros = jnp.zeros((*values.shape[:-1], length), jnp.float32)
        return jnp.put_along_axis(zeros, places, values, axis=-1, inplace=False)

    def num_bytes(self, length: int) -> int:
        return 4 * self._whole(2 * self._count(length))


def make_compression(text: str, tile: int = 1) -> Compression:
    """The wire format of a name.

    Args:
      text: "f32", "bf16", "int8", "int4" or "topk:FRACTION".
      tile: elements to whose multiples an encoded piece is padded.

    Raises:
      MeshparError: no such format.
    """
    known = {
        "f32": Compression(tile),
        "bf16": _BFloat16(tile),
        "int8": _Integers(tile, 8),
        "int4": _Integers(tile, 4),
    }
    if text in known:
        return known[text]
    if match := re.fullmatch(r"topk:(0?\.\d+|1|1\.0)", text):
        if (fraction := float(match.group(1))) > 0:
            return _TopK(tile, fraction)
    raise MeshparError(
        f"wire={text!r}: use {', '.join(known)} or topk:FRACTION (as in topk:0.01)"
    )
