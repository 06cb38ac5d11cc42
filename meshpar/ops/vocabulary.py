"""Embedding lookup and cross-entropy over a vocabulary that is split over devices.

Under `vocab=pipe` every stage of a pipeline holds a slice of the vocabulary, so that
embedding and head load all stages equally. A model whose loss sees the logits through
`token_losses` alone runs under it unchanged; elsewhere these functions are what their
names say.

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


def _axis(name: str, size: int) -> str | None:
    """The manual axis over which the vocabulary is split, if it is."""
    scope = current_scope()
    if scope is None:
        return None
    scope.vocabulary_used[name] = size
    split = scope.layout.splits_vocabulary and PIPE in scope.manual_axes
    return PIPE if split else None


def lookup(w_VD: Array, ids: Array) -> Array:
    """Rows of an embedding by token id: w[V, D], ids[...] -> x[..., D].

    Over a split vocabulary every device looks up the ids of its slice, and one
    all_reduce of x puts them together.

    Args:
      w_VD: the embedding, or this device's slice of it.
      ids: integer token ids of any shape.
    """
    if (axis := _axis("lookup", w_VD.shape[0])) is None:
        return w_VD[ids]
    local = ids - lax.axis_index(axis) * w_VD.shape[0]
    ours = (local >= 0) & (local < w_VD.shape[0])
    x_D = w_VD[jnp.clip(local, 0, w_VD.shape[0] - 1)]
    return sum_varying(jnp.where(ours[..., None], x_D, jnp.zeros_like(x_D)), axis)


def token_losses(logits_BLV: Array, targets_BL: Array) -> Array:
    """Negative log-likelihood of every target, in nats, float32 [B, L].

    The target's logit is picked by comparison, not by indexing: over a sharded vocab
    that stays local and costs one small all_reduce.

    Args:
      logits_BLV: logits, or those of this device's slice of the vocabulary.
      targets_BL: token ids.
    """
    axis, logits_BLV = (
        _axis("token_losses", logits_BLV.shape[-1]),
        logits_BLV.astype(jnp.float32),
    )
    size = logits_BLV.shape[-1]
    ids_V = jnp.arange(size) + (0 if axis is None else lax.axis_index(axis) * size)
    hit_BLV = targets_BL[..., None] == ids_V[None, None]
    target_BL = jnp.sum(jnp.where(hit_BLV, logits_BLV, 0.0), axis=-1)
    if axis is None:
        return jax.nn.logsumexp(logits_BLV, axis=-1) - target_BL
    most_BL = lax.pmax(lax.stop_gradient(jnp.max(logits_BLV, axis=-1)), axis)
    parts_BL = jnp.sum(jnp.exp(logits_BLV - most_BL[..., None]), axis=-1)
    return jnp.log(lax.psum(parts_BL, axis)) + most_BL - lax.psum(target_BL, axis)
