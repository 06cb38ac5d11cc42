"""Embedding lookup and cross-entropy over a vocabulary that is split over devices.

Under `vocab=pipe` every stage of a pipeline holds a slice of the vocabulary, so that
embedding and head load all stages equally. A model runs under it unchanged if it embeds
with `lookup` and its loss uses the logits only through `token_losses`. Under any other
layout both are the plain functions.

Source: Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism,
  arXiv:2411.05288; Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.
"""

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.collectives.varying import sum_varying
from meshpar.layouts.axes import PIPE
from meshpar.layouts.scope import current_scope


def _split_axis(name: str, size: int) -> str | None:
    """The manual axis that splits the vocabulary, if any; records the use of `name`."""
    scope = current_scope()
    if scope is None:
        return None
    scope.vocabulary_used[name] = size
    split = scope.layout.splits_vocabulary and PIPE in scope.manual_axes
    return PIPE if split else None


def lookup(w_VD: Array, ids: Array) -> Array:
    """Rows of an embedding by token id: w[V, D], ids[...] -> x[..., D].

    If the vocabulary is split, every device looks up the ids of its slice, and one
    all_reduce of x adds the rows.

    Args:
      w_VD: the embedding, or this device's slice of it.
      ids: integer token ids of any shape.
    """
    size = w_VD.shape[0]
    if (axis := _split_axis("lookup", size)) is None:
        return w_VD[ids]
    row = ids - lax.axis_index(axis) * size
    in_slice = (row >= 0) & (row < size)
    x_D = w_VD[jnp.clip(row, 0, size - 1)]
    return sum_varying(jnp.where(in_slice[..., None], x_D, jnp.zeros_like(x_D)), axis)


def token_losses(logits_BLV: Array, targets_BL: Array) -> Array:
    """Negative log-likelihood of every target, in nats, float32 [B, L].

    The target's logit is picked by comparison, not by indexing: if the vocabulary is
    split, the comparison is local and costs one all_reduce of [B, L].

    Args:
      logits_BLV: logits of the vocabulary, or of this device's slice of it.
      targets_BL: integer token ids.
    """
    size = logits_BLV.shape[-1]
    axis = _split_axis("token_losses", size)
    logits_BLV = logits_BLV.astype(jnp.float32)
    ids_V = jnp.arange(size) + (0 if axis is None else lax.axis_index(axis) * size)
    is_target_BLV = targets_BL[..., None] == ids_V[None, None]
    target_BL = jnp.sum(jnp.where(is_target_BLV, logits_BLV, 0.0), axis=-1)
    if axis is None:
        return jax.nn.logsumexp(logits_BLV, axis=-1) - target_BL
    max_BL = lax.pmax(lax.stop_gradient(jnp.max(logits_BLV, axis=-1)), axis)
    sum_BL = lax.psum(jnp.sum(jnp.exp(logits_BLV - max_BL[..., None]), axis=-1), axis)
    return jnp.log(sum_BL) + max_BL - lax.psum(target_BL, axis)
