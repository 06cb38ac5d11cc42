"""Wire formats: how averages over replicas travel, and what of them arrives.

A lossy format is a pair of functions, one way: encode [..., n] to small arrays, and
decode them again. A mean is an all_to_all of encoded pieces and a local sum; handing it
out is an all_gather of encoded pieces. Nothing is ever added in a small dtype.

Source: Douillard et al., Streaming DiLoCo, arXiv:2501.18512, section 2.4 (4 bits);
  Dettmers et al., arXiv:2110.02861 (a scale per block); Stich et al., sparsified SGD,
  arXiv:1809.07599 (top-k).
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.errors import MeshparError

Array = jax.Array
Arrays = tuple[Array, ...]

_BLOCK = 256
"""Numbers that share one scale."""


class Wire:
    """Float32 as it is, by reduce_scatter and all_gather."""

    block = 1
    """What the length of a piece has to be a multiple of."""
    lossy = False

    def encode(self, x: Array) -> Arrays:
        """[..., n] float32 to arrays with the same leading dims."""
        return (x,)

    def decode(self, encoded: Arrays, length: int) -> Array:
        """The inverse, [..., length] float32."""
        del length
        return encoded[0]

    def reduce(self, x: Array, axis: str) -> tuple[Array, Array]:
        """The mean over the replicas, inside shard_map.

        Args:
          x: [R * n], float32.
          axis: mesh axis of the replicas.

        Returns:
          This replica's piece [n] of the mean, and [R * n] what of x arrived.
        """
        replicas = lax.axis_size(axis)
        return lax.psum_scatter(x, axis, tiled=True) / replicas, x

    def gather(self, x: Array, axis: str) -> tuple[Array, Array]:
        """The pieces [n] of all replicas as they arrive, [R * n], and one's own."""
        return lax.all_gather(x, axis, tiled=True), x

    def pieces(self, length: int) -> list[int]:
        """Bytes of the arrays that stand for `length` numbers."""
        return [4 * length]


class _Lossy(Wire):
    """Pieces are encoded; sums are taken after decoding."""

    lossy = True

    def reduce(self, x: Array, axis: str) -> tuple[Array, Array]:
        """As in `Wire`."""
        replicas = lax.axis_size(axis)
        length = len(x) // replicas
        encoded = self.encode(x.reshape(replicas, length))
        sent = self.decode(encoded, length)
        got = tuple(lax.all_to_all(part, axis, 0, 0) for part in encoded)
        return self.decode(got, length).mean(axis=0), sent.reshape(-1)

    def gather(self, x: Array, axis: str) -> tuple[Array, Array]:
        """As in `Wire`."""
        encoded = self.encode(x)
        got = tuple(lax.all_gather(part, axis) for part in encoded)
        return self.decode(got, len(x)).reshape(-1), self.decode(encoded, len(x))


class _BFloat16(_Lossy):
    """16 bits; as integers, because XLA:CPU would widen bfloat16 collectives."""

    def encode(self, x: Array) -> Arrays:
        return (lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16),)

    def decode(self, encoded: Arrays, length: int) -> Array:
        del length
        wide = lax.bitcast_convert_type(encoded[0], jnp.bfloat16)
        return wide.astype(jnp.float32)

    def pieces(self, length: int) -> list[int]:
        return [2 * length]


@dataclasses.dataclass(frozen=True)
class _Integers(_Lossy):
    """8 or 4 bits, and a float32 scale per block."""

    bits: int
    block = _BLOCK

    def encode(self, x: Array) -> Arrays:
        blocks = x.reshape(*x.shape[:-1], -1, _BLOCK)
        largest = 2 ** (self.bits - 1) - 1
        scales = jnp.abs(blocks).max(axis=-1, keepdims=True) / largest
        numbers = jnp.round(blocks / jnp.where(scales == 0, 1, scales))
        numbers = numbers.astype(jnp.int8).reshape(x.shape)
        if self.bits == 4:
            pairs = (numbers + 8).astype(jnp.uint8).reshape(*x.shape[:-1], -1, 2)
            numbers = pairs[..., 0] | (pairs[..., 1] << 4)
        return numbers, scales[..., 0]

    def decode(self, encoded: Arrays, length: int) -> Array:
        numbers, scales = encoded
        if self.bits == 4:
            pairs = jnp.stack([numbers & 15, numbers >> 4], axis=-1)
            numbers = pairs.astype(jnp.int8) - 8
        blocks = numbers.reshape(*scales.shape, _BLOCK).astype(jnp.float32)
        return (blocks * scales[..., None]).reshape(*scales.shape[:-1], length)

    def pieces(self, length: int) -> list[int]:
        return [length * self.bits // 8, 4 * length // _BLOCK]


@dataclasses.dataclass(frozen=True)
class _TopK(_Lossy):
    """The largest numbers of a piece and their places; all others count as 0."""

    fraction: float

    def _count(self, length: int) -> int:
        return max(1, math.ceil(self.fraction * length))

    def encode(self, x: Array) -> Arrays:
        _, places = lax.top_k(jnp.abs(x), self._count(x.shape[-1]))
        return jnp.take_along_axis(x, places, axis=-1), places

    def decode(self, encoded: Arrays, length: int) -> Array:
        values, places = encoded
        zeros = jnp.zeros((*values.shape[:-1], length), values.dtype)
        return jnp.put_along_axis(zeros, places, values, axis=-1, inplace=False)

    def pieces(self, length: int) -> list[int]:
        return [4 * self._count(length)] * 2


def make(text: str) -> Wire:
    """The wire format of a name.

    Raises:
      MeshparError: no such format.
    """
    known = {
        "f32": Wire(),
        "bf16": _BFloat16(),
        "int8": _Integers(8),
        "int4": _Integers(4),
    }
    if text in known:
        return known[text]
    if match := re.fullmatch(r"topk:(0?\.\d+|1|1\.0)", text):
        if (fraction := float(match.group(1))) > 0:
            return _TopK(fraction)
    raise MeshparError(
        f"wire={text!r}: use {', '.join(known)} or topk:FRACTION (as in topk:0.01)"
    )
