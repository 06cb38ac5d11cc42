"""Random keys whose draws in a part of a batch are parts of one draw for all rows.

A model draws noise (dropout) in the shape of the activations that it sees. Those are of
the whole batch on one device, but of some of its rows inside shard_map or in a
microbatch, where the same key would give every part the same noise. A key of
`for_shard` knows the rows of its part: a draw of shape [b, ...] holds those rows of the
draw of shape [B, ...] by the plain key. Dims after the first, such as the length, can
be split as well. So the noise of a row depends neither on the mesh nor on the number of
microbatches.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import random as extend_random

from meshpar.arrays import Array
from meshpar.collectives.element_indices import Split, Words, indices
from meshpar.errors import MeshparError
from meshpar.layouts.row_draws import Draws
from meshpar.layouts.token_order import CONTIGUOUS

_PLAIN = "threefry2x32"


class Inner(NamedTuple):
    """The split of a dim after the first.

    Attributes:
      shard: number of this shard, integer scalar; may vary inside shard_map.
      num: number of shards.
      order: which elements each shard has, as in `layouts.token_order`.
    """

    shard: Array
    num: int
    order: str = CONTIGUOUS


class _Kind(NamedTuple):
    """The kind of one part of a batch, which all of its keys have in common.

    Attributes:
      rows: number of rows of the part.
      draws: which draws belong to them.
      inner: how the dims after the first are split.
    """

    rows: int
    draws: Draws
    inner: tuple[Split, ...]

    def per_row(self, shape: tuple[int, ...], sizes: frozenset[int] | None) -> int:
        """Entries per row in the first dim of a draw; 0 if it belongs to no rows."""
        size, rest = divmod(shape[0] if shape else 0, max(self.rows, 1))
        return 0 if rest or (sizes is not None and size not in sizes) else size


_KINDS: dict[str, _Kind] = {}
"""{dtype of keys: their kind}."""


def for_shard(
    key: Array, shard: Array, rows: int, *inner: Inner, draws: Draws | None = None
) -> Array:
    """Makes a key that draws one shard of the plain key's draws.

    A draw of shape [b, l, ...] has the numbers that the plain key's draw of the global
    shape has at this shard's places: rows from shard * b on, and l places of the next
    dim by their order. A draw with fewer dims is not split by the missing ones, and one
    whose first dim holds no rows not by the first.

    Args:
      key: a threefry key, scalar.
      shard: number of this shard of the first dim, integer scalar; may vary inside
        shard_map.
      rows: b, the number of rows of every shard.
      *inner: how each dim after the first is split; one splits the second dim, two the
        second and third.
      draws: which draws belong to rows; by default those whose first dim is a multiple
        of b.

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
    first = shard.astype(jnp.uint32) * jnp.uint32(rows)
    words = [first, jnp.ones_like(first)]
    words += [dim.shard.astype(jnp.uint32) for dim in inner]
    splits = tuple((dim.num, dim.order) for dim in inner)
    impl = _impl(_Kind(rows, draws or Draws(), splits))
    return jax.random.wrap_key_data(_with_words(key, words), impl=impl)


def for_part(key: Array, part: Array, num: int) -> Array:
    """The key of one of several contiguous parts of a shard's rows.

    Args:
      key: of the shard, by `for_shard`.
      part: number of the part, integer scalar; may vary inside shard_map.
      num: number of parts.
    """
    rows = _KINDS[str(key.dtype)].rows // num
    return _narrowed(key, part.astype(jnp.uint32) * jnp.uint32(rows), num, 1)


def for_microbatch(key: Array, microbatch: Array, num: int) -> Array:
    """The key of rows m, m+M, m+2M, ... of a shard, as `split_microbatches` has them.

    Args:
      key: of the shard, by `for_shard`.
      microbatch: m, integer scalar.
      num: M, the number of microbatches.
    """
    return _narrowed(key, microbatch.astype(jnp.uint32), num, num)


def _narrowed(key: Array, first: Array, num: int, step: int) -> Array:
    """The key of a part that has every `step`-th row of the shard."""
    kind, data = _KINDS[str(key.dtype)], jax.random.key_data(key)
    words = [data[2] + first * data[3], data[3] * jnp.uint32(step)]
    words = [word[None] for word in words]
    data = jnp.concatenate([data[:2], *words, data[4:]])
    impl = _impl(kind._replace(rows=kind.rows // num))
    return jax.random.wrap_key_data(data, impl=impl)


@functools.cache
def _impl(kind: _Kind) -> Any:
    """The implementation of the keys of one kind.

    Their data are the two words of the plain key, the first row and the step from row
    to row, and the shard number of each other split dim.
    """
    plain = [jnp.uint32(0), jnp.uint32(1), *(jnp.uint32(0) for _ in kind.inner)]
    suffix = "_".join(f"{num}{order}" for num, order in kind.inner)
    sizes = ("any" if s is None else "+".join(map(str, sorted(s))) for s in kind.draws)
    name = f"{kind.rows}_{'_'.join(sizes)}_{suffix}"
    impl = extend_random.define_prng_impl(
        key_shape=(2 + len(plain),),
        seed=lambda seed: _with_words(jax.random.key(seed, impl=_PLAIN), plain),
        split=functools.partial(_split, kind=kind),
        random_bits=functools.partial(_random_bits, kind=kind),
        fold_in=_fold_in,
        name=f"meshpar_sharded_threefry_{name}",
        tag=f"mpsh_{name}",
    )
    data = jax.ShapeDtypeStruct((2 + len(plain),), jnp.uint32)
    made = jax.eval_shape(lambda data: jax.random.wrap_key_data(data, impl=impl), data)
    _KINDS[str(made.dtype)] = kind
    return impl


def _plain_key(data: Array) -> Array:
    return jax.random.wrap_key_data(data[:2], impl=_PLAIN)


def _with_words(keys: Array, words: list[Array]) -> Array:
    data = jax.random.key_data(keys)
    columns = [jnp.broadcast_to(word, (*data.shape[:-1], 1)) for word in words]
    return jnp.concatenate([data, *columns], axis=-1)


def _words(data: Array) -> list[Array]:
    return [data[i] for i in range(2, len(data))]


def _split(data: Array, shape: tuple[int, ...], kind: _Kind) -> Array:
    """Keys: one for each row, which draw as plain ones do, or some for all rows."""
    if not (per_row := kind.per_row(shape, kind.draws.keys)):
        return _with_words(jax.random.split(_plain_key(data), shape), _words(data))
    words = jnp.stack(_threefry(data, shape, per_row, kind.inner), axis=-1)
    own = [jnp.zeros_like(data[2]), jnp.ones_like(data[3]), *_words(data)[2:]]
    columns = [jnp.broadcast_to(word, (*shape, 1)) for word in own]
    return jnp.concatenate([words, *columns], axis=-1)


def _fold_in(data: Array, number: Array) -> Array:
    return _with_words(jax.random.fold_in(_plain_key(data), number), _words(data))


def _random_bits(
    data: Array, bit_width: int, shape: tuple[int, ...], kind: _Kind
) -> Array:
    """Partitionable threefry: the bits of an element follow from its global index."""
    if math.prod(shape) >= 2**32:
        raise MeshparError(
            f"a draw of shape {shape} has 2**32 elements or more on a shard; draw it "
            "in parts, or use more shards"
        )
    per_row = kind.per_row(shape, kind.draws.rows)
    first, second = _threefry(data, shape, per_row, kind.inner)
    if bit_width == 64:
        wide = first.astype(jnp.uint64) << jnp.uint64(32)
        return wide | second.astype(jnp.uint64)
    return (first ^ second).astype(jnp.dtype(f"uint{bit_width}"))


def _threefry(
    data: Array, shape: tuple[int, ...], per_row: int, inner: tuple[Split, ...]
) -> Words:
    high, low = indices(_words(data), shape, per_row, inner)
    return extend_random.threefry2x32_p.bind(data[0], data[1], high, low)
