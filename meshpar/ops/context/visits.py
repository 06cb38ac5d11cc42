"""Keys that visit a device on a ring, cut into pairs with the queries that see them.

A zigzag device has an early and a late part of every sequence, and skips the pairs of
parts in which no query sees a key.

Source: Liu et al., Ring Attention with Blockwise Transformers, arXiv:2310.01889.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.layouts.axes import CONTEXT
from meshpar.layouts.token_order import ZIGZAG, positions_on
from meshpar.ops.attention_mask import Tokens, is_seen

_BLOCK = 1024
"""Most queries whose scores are in memory at once."""


@dataclasses.dataclass(frozen=True)
class Places:
    """Places on a ring of devices.

    Attributes:
      num: number of places.
      heads: neighbours that share a place, each with its part of the heads.
      order: of the tokens.
    """

    num: int
    heads: int
    order: str

    @property
    def num_ranks(self) -> int:
        """Devices along `context`."""
        return self.num * self.heads

    def visit(
        self, hops: Any, length: int, segments: Sequence[Array], window: int
    ) -> "Visit":
        """The visit of keys to this device's queries after some hops.

        Args:
          hops: their number; the int 0 for the device's own keys.
          length: tokens of each place.
          segments: documents of all tokens, integer [B, num * length], or none.
          window: as in `is_seen`.
        """
        own = lax.axis_index(CONTEXT) // self.heads
        source = (own - hops) % self.num
        queries, keys = (self._tokens(x, length, segments) for x in (own, source))
        half = length // 2
        if self.order != ZIGZAG:
            starts, size = jnp.zeros((1, 2), jnp.int32), length
        elif isinstance(hops, int) and hops == 0:
            starts, size = jnp.array([(0, 0), (half, 0), (half, half)]), half
        else:
            # Late queries see all early keys. Beside them, early queries see the early
            # keys of places before theirs, and late queries the late ones of others.
            other = jnp.where(source < own, 0, half)
            late = jnp.stack([jnp.full_like(other, half), jnp.zeros_like(other)])
            starts, size = jnp.stack([late, jnp.stack([other, other])]), half
        block = max(n for n in range(1, min(size, _BLOCK) + 1) if size % n == 0)
        blocks = jnp.arange(0, size, block)[:, None] * jnp.array([[1, 0]])
        starts = (starts[:, None] + blocks[None]).reshape(-1, 2)
        return Visit(starts, block, size, queries, keys, window)

    def _tokens(self, place: Array, length: int, segments: Sequence[Array]) -> Tokens:
        """The visits of one place on the ring."""
        size, first, num = length // self.heads, place * self.heads, self.num_ranks
        of_ranks = [
            positions_on(self.order, first + i, num, size) for i in range(self.heads)
        ]
        places = self.arranged(jnp.concatenate(of_ranks), 0)
        if not segments:
            return Tokens(places)
        own = _take(segments[0], place * length, length, 1)
        return Tokens(places, self.arranged(own, 1))

    def arranged(self, x: Array, dim: int) -> Array:
        """The early tokens of all neighbours before their late ones."""
        return self._swapped(x, dim, (self.heads, 2))

    def as_given(self, x: Array, dim: int) -> Array:
        """The inverse of `arranged`."""
        return self._swapped(x, dim, (2, self.heads))

    def _swapped(self, x: Array, dim: int, parts: tuple[int, int]) -> Array:
        if self.order != ZIGZAG or self.heads == 1:
            return x
        split = x.reshape(*x.shape[:dim], *parts, -1, *x.shape[dim + 1 :])
        return split.swapaxes(dim, dim + 1).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class Visit:
    """Pairs of queries of this device and keys that visit it.

    Attributes:
      starts: first query and first key of each pair, integer [P, 2].
      num_queries: of a pair.
      num_keys: of a pair.
      queries: all of this device.
      keys: all that visit.
      window: as in `is_seen`.
    """

    starts: Array
    num_queries: int
    num_keys: int
    queries: Tokens
    keys: Tokens
    window: int

    def over_pairs(self, add: Callable[[Any, Array], Any], sums: Any) -> Any:
        """Runs add(sums, start) for one pair after another."""
        return lax.scan(lambda sums, at: (add(sums, at), None), sums, self.starts)[0]

    def queries_at(self, at: Array, x: Array) -> Array:
        """The part of x[B, L, ...] that belongs to the queries of a pair."""
        return _take(x, at[0], self.num_queries, 1)

    def keys_at(self, at: Array, x: Array) -> Array:
        """The part of x[2, B, M, ...] that belongs to the keys of a pair."""
        return _take(x, at[1], self.num_keys, 2)

    def seen_at(self, at: Array) -> Array:
        """The mask of a pair: the keys that its queries see, bool [B or 1, L, M]."""
        queries = _tokens_at(self.queries, at[0], self.num_queries)
        keys = _tokens_at(self.keys, at[1], self.num_keys)
        return is_seen(queries, keys, self.window)


def _tokens_at(tokens: Tokens, start: Array, size: int) -> Tokens:
    places, segments = tokens
    places = _take(places, start, size, 0)
    return Tokens(places, None if segments is None else _take(segments, start, size, 1))


def _take(x: Array, start: Array, size: int, dim: int) -> Array:
    return lax.dynamic_slice_in_dim(x, start, size, dim)


def put(x: Array, new: Array, start: Array, dim: int) -> Array:
    """Replaces a part of x along a dim, from `start` on."""
    return lax.dynamic_update_slice_in_dim(x, new, start, dim)
