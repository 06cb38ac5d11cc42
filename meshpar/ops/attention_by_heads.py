"""Causal attention in plain jnp, head by head: the form that is fastest on CPUs.

XLA:CPU multiplies matrices whose rows lie together; it would transpose the queries and
keys of every head for each matmul. Sums of weights divide the outputs, which are fewer.
"""

import math

import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.ops.attention_mask import Tokens, is_seen

_UNSEEN = -1e30
"""Score of a key that a query does not see; its weight is 0."""


def attention_by_heads(
    q_BLNH: Array,
    k_BLKH: Array,
    v_BLKH: Array,
    segments_BL: Array | None = None,
    window: int = 0,
) -> Array:
    """Causal attention; scores and their softmax are in float32 or wider.

    Args:
      q_BLNH: queries.
      k_BLKH: keys; K divides N (grouped-query attention).
      v_BLKH: values.
      segments_BL: number of the document of each token; None for one document.
      window: tokens that each token sees, itself among them; 0 for all.

    Returns:
      y_BLNH, in the dtype of the queries.
    """
    rows, length, heads, width = q_BLNH.shape
    groups, dtype = heads // k_BLKH.shape[2], q_BLNH.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    # The queries of a key's heads are rows of one matrix.
    q_BKRH = _by_heads(q_BLNH).reshape(rows, -1, groups * length, width)
    k_BKMH, v_BKMH = _by_heads(k_BLKH), _by_heads(v_BLKH)
    scores = jnp.einsum(
        "BKRH,BKMH->BKRM", q_BKRH, k_BKMH, preferred_element_type=wide
    ) * (1 / math.sqrt(width))
    places = Tokens(jnp.arange(length), segments_BL)
    seen_BLM = jnp.tile(is_seen(places, places, window), (1, groups, 1))
    scores = jnp.where(seen_BLM[:, None], scores, _UNSEEN)
    top = lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - top)
    y_BKRH = jnp.einsum(
        "BKRM,BKMH->BKRH", weights.astype(dtype), v_BKMH, preferred_element_type=wide
    )
    y_BKRH /= weights.sum(-1, keepdims=True)
    y_BNLH = y_BKRH.astype(dtype).reshape(rows, heads, length, width)
    return _by_heads(y_BNLH)


def _by_heads(x: Array) -> Array:
    """Swaps the dims of length and heads."""
    return x.swapaxes(1, 2)
