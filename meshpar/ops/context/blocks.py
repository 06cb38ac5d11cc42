"""Attention of some queries to one block of keys: merged outputs, and gradients.

Queries are grouped by the head of keys that they share: [B, L, K, G, H]. Sums are
float32. The backward pass takes the output and the log-sum-exp of all blocks together:
those of one block would give wrong gradients.

Source: Liu et al., Blockwise Parallel Transformer, arXiv:2305.19370, section 3.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshpar.arrays import Array

_MASKED = -1e30
"""Score of a key that is not seen; finite, as a query may see none of a block."""


class Sums(NamedTuple):
    """Attention to the blocks so far.

    Attributes:
      y: outputs, float32 [B, L, K, G, H].
      lse: log of the sum of exponentials of the scores, float32 [B, L, K, G].
    """

    y: Array
    lse: Array


class Outer(NamedTuple):
    """Results over all blocks, which the backward pass needs.

    Attributes:
      lse: as in `Sums`.
      dy: gradient of the outputs, [B, L, K, G, H].
      delta: its inner product with the outputs, float32 [B, L, K, G].
    """

    lse: Array
    dy: Array
    delta: Array


def no_blocks(q: Array) -> Sums:
    """The sums before the first block."""
    empty = jnp.full(q.shape[:-1], _MASKED, jnp.float32)
    return Sums(jnp.zeros(q.shape, jnp.float32), empty)


def with_block(sums: Sums, q: Array, kv: Array, seen: Array) -> Sums:
    """Adds one block.

    Args:
      sums: of the blocks before.
      q: queries.
      kv: keys and values, [2, B, M, K, H].
      seen: which keys each query sees, bool [B or 1, L, M].
    """
    scores = _scores(q, kv[0], seen)
    both = jnp.logaddexp(sums.lse, jax.nn.logsumexp(scores, axis=-1))
    weights = jnp.exp(scores - both[..., None]).astype(kv.dtype)
    new = _product("BLKGM,BMKH->BLKGH", weights, kv[1])
    return Sums(sums.y * jnp.exp(sums.lse - both)[..., None] + new, both)


def block_gradients(
    q: Array, kv: Array, seen: Array, outer: Outer
) -> tuple[Array, Array]:
    """(gradients of the queries, of keys and values) through one block, float32.

    Args:
      q: queries.
      kv: keys and values, [2, B, M, K, H].
      seen: as in `with_block`.
      outer: of all blocks.
    """
    k, v = kv
    weights = jnp.exp(_scores(q, k, seen) - outer.lse[..., None])
    dv = _product("BLKGM,BLKGH->BMKH", weights.astype(v.dtype), outer.dy)
    dweights = _product("BLKGH,BMKH->BLKGM", outer.dy, v)
    ds = weights * (dweights - outer.delta[..., None]) * q.shape[-1] ** -0.5
    ds = ds.astype(k.dtype)
    dq = _product("BLKGM,BMKH->BLKGH", ds, k)
    return dq, jnp.stack([_product("BLKGM,BLKGH->BMKH", ds, q), dv])


def _scores(q: Array, k: Array, seen: Array) -> Array:
    scores = _product("BLKGH,BMKH->BLKGM", q, k) * q.shape[-1] ** -0.5
    return jnp.where(seen[:, :, None, None], scores, _MASKED)


def _product(dims: str, a: Array, b: Array) -> Array:
    return jnp.einsum(dims, a, b, preferred_element_type=jnp.float32)
