"""Attention of new tokens to a cache of keys and values, on the shards of a layout.

The cache of all layers is one array, so that a loop over layers updates it in place.
Shape letters are those of `meshpar.arrays`; M is the length of the cache.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.errors import LayoutError
from meshpar.layouts.axes import in_use, ways_of
from meshpar.layouts.plan import Spec, partition_spec
from meshpar.layouts.scope import Scope, activation_axes, current_scope

CACHE_DIMS = ("layers", "cache_batch", "cache_length", "kv_heads", "head_dim")
"""Names of the dims of cached keys and values, for rules of layouts."""

_CALL = "cached_attention"


class KeysAndValues(NamedTuple):
    """The cache of all layers.

    Attributes:
      keys: [layers, B, M, K, H].
      values: [layers, B, M, K, H].
    """

    keys: Array
    values: Array


def cached_attention(
    q_BLNH: Array,
    k_BLKH: Array,
    v_BLKH: Array,
    cache: KeysAndValues,
    layer: Array | int,
    positions_BL: Array,
    *,
    window: int = 0,
) -> tuple[Array, KeysAndValues]:
    """Writes keys and values of new tokens, and attends to all up to each token's own.

    Slot m of the cache holds position m of a sequence. Later slots are not seen, so
    they may hold anything. Tokens at positions beyond the cache are not written.

    Communication:
    - Axes that split the length of the cache: its parts are merged by the logarithms of
      their sums of exponentials, with float32 all_reduces of [B, L, N] twice and
      [B, L, N, H].
    - Axes that split the heads of queries, and not those of the cache: queries are
      gathered.
    - Axes that split the rows of the cache, and not those of new tokens: outputs are
      gathered.

    Args:
      q_BLNH: queries, any float dtype.
      k_BLKH: keys; K divides N (grouped-query attention).
      v_BLKH: values.
      cache: of all layers.
      layer: number of the layer.
      positions_BL: of the tokens in their sequences, integer.
      window: positions that each position sees, itself among them; 0 for all.

    Returns:
      (y_BLNH in the dtype of the queries, the cache).

    Raises:
      LayoutError: a dim that does not divide over its axes, or axes that split new
        tokens in another way than the cache.

    Source: Dao et al., Flash-Decoding for long-context inference (2023): parts of the
      keys merged by log-sum-exp.
    """
    args = q_BLNH, k_BLKH, v_BLKH, cache, jnp.asarray(layer), positions_BL
    scope = current_scope()
    if scope is None or not in_use(scope.mesh.shape, scope.mesh.shape):
        return _OnShards(window)(*args)
    rows, heads, kv_heads = (
        activation_axes(scope, [name], _CALL)[0]
        for name in ("batch", "heads", "kv_heads")
    )
    stored = activation_axes(scope, CACHE_DIMS, _CALL)
    _check_divides(stored, k_BLKH, cache, scope)
    cache_rows, length = stored[1:3]
    if cache_rows[: len(rows)] != rows or kv_heads not in ((), heads):
        raise LayoutError(
            f"{_CALL}: activations.batch={'+'.join(rows) or 'none'} does not begin "
            f"activations.cache_batch={'+'.join(cache_rows) or 'none'}, or other axes "
            "split kv_heads than heads; leave these rules out"
        )
    more = cache_rows[len(rows) :]
    gathered = () if kv_heads == heads else heads
    run = _OnShards(window, length, more, gathered)
    new = partition_spec((rows, (), kv_heads, ()))
    cached = KeysAndValues(*[partition_spec(stored)] * 2)
    q = partition_spec((rows, (), heads, ()))
    return jax.shard_map(
        run,
        mesh=scope.mesh,
        in_specs=(q, new, new, cached, partition_spec(()), partition_spec((rows,))),
        out_specs=(q, cached),
    )(*args)


def _check_divides(
    specs: Spec, k_BLKH: Array, cache: KeysAndValues, scope: Scope
) -> None:
    """Raises LayoutError if a dim of the cache does not divide over its axes."""
    shape = (len(cache.keys), len(k_BLKH), *cache.keys.shape[2:])
    for name, size, axes in zip(CACHE_DIMS, shape, specs, strict=True):
        if size % (ways := ways_of(axes, scope.mesh.shape)):
            raise LayoutError(
                f"{_CALL}: {name}={size} does not divide over {'*'.join(axes)}={ways}; "
                f"change the size, or set activations.{name}=none"
            )


@dataclasses.dataclass(frozen=True)
class _OnShards:
    """`cached_attention` of one device's part of the cache.

    Attributes:
      window: as in `cached_attention`.
      length_axes: axes that split the length of the cache.
      row_axes: axes that split its rows, and not those of the new tokens.
      head_axes: axes that split the heads of the queries, and not those of the cache.
    """

    window: int
    length_axes: tuple[str, ...] = ()
    row_axes: tuple[str, ...] = ()
    head_axes: tuple[str, ...] = ()

    def __call__(
        self,
        q_BLNH: Array,
        k_BLKH: Array,
        v_BLKH: Array,
        cache: KeysAndValues,
        layer: Array,
        positions_BL: Array,
    ) -> tuple[Array, KeysAndValues]:
        if self.head_axes:
            q_BLNH = lax.all_gather(q_BLNH, self.head_axes, axis=2, tiled=True)
        q_BLNH, k_BLKH, v_BLKH, positions_BL = (
            _own_part(x, self.row_axes, 0)
            for x in (q_BLNH, k_BLKH, v_BLKH, positions_BL)
        )
        cache, first = self._written(cache, layer, k_BLKH, v_BLKH, positions_BL)
        y_BLNH = self._attended(q_BLNH, cache, layer, positions_BL, first)
        y_BLNH = _own_part(y_BLNH, self.head_axes, 2)
        if self.row_axes:
            y_BLNH = lax.all_gather(
                y_BLNH, self.row_axes, axis=0, tiled=True, to="invarying"
            )
        return y_BLNH, cache

    def _written(
        self,
        cache: KeysAndValues,
        layer: Array,
        k_BLKH: Array,
        v_BLKH: Array,
        positions_BL: Array,
    ) -> tuple[KeysAndValues, Array | int]:
        """(the cache with the new tokens, the position of its first slot)."""
        size, first = cache.keys.shape[2], 0
        if self.length_axes:
            first = lax.axis_index(self.length_axes) * size
        slot_BL = positions_BL - first
        # An index below 0 would count from the end.
        slot_BL = jnp.where(slot_BL < 0, size, slot_BL)
        place = layer, jnp.arange(len(k_BLKH))[:, None], slot_BL
        pairs = zip(cache, (k_BLKH, v_BLKH), strict=True)
        written = (
            old.at[place].set(new.astype(old.dtype), mode="drop") for old, new in pairs
        )
        return KeysAndValues(*written), first

    def _attended(
        self,
        q_BLNH: Array,
        cache: KeysAndValues,
        layer: Array,
        positions_BL: Array,
        first: Array | int,
    ) -> Array:
        """Attention to the slots that every token sees, in the queries' dtype."""
        keys_BMKH, values_BMKH = cache.keys[layer], cache.values[layer]
        batch, length, _, head_dim = q_BLNH.shape
        q_BLKGH = q_BLNH.reshape(batch, length, keys_BMKH.shape[2], -1, head_dim)
        scores = jnp.einsum(
            "BLKGH,BMKH->BKGLM", q_BLKGH, keys_BMKH, preferred_element_type=jnp.float32
        )
        places_M = first + jnp.arange(keys_BMKH.shape[1])
        distance_BLM = positions_BL[:, :, None] - places_M[None, None]
        seen_BLM = distance_BLM >= 0
        if self.window:
            seen_BLM &= distance_BLM < self.window
        seen = seen_BLM[:, None, None]
        scores = jnp.where(seen, scores * head_dim**-0.5, -jnp.inf)
        # Every token sees itself, so that the maximum over all devices is finite.
        highest = jnp.max(scores, axis=-1, keepdims=True)
        if self.length_axes:
            highest = lax.pmax(highest, self.length_axes)
        weights = jnp.exp(scores - highest)
        total = jnp.sum(weights, axis=-1)
        y = jnp.einsum(
            "BKGLM,BMKH->BLKGH",
            weights.astype(values_BMKH.dtype),
            values_BMKH,
            preferred_element_type=jnp.float32,
        )
        if self.length_axes:
            y, total = lax.psum((y, total), self.length_axes)
        y = y / jnp.moveaxis(total, -1, 1)[..., None]
        return y.reshape(q_BLNH.shape).astype(q_BLNH.dtype)


def _own_part(x: Array, axes: tuple[str, ...], dim: int) -> Array:
    """This device's part of a dim that is whole along axes."""
    if not axes:
        return x
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, dim)
