"""Embedding lookup and cross-entropy over a vocabulary that is split over devices.

Under `vocab=pipe` every stage of a pipeline holds a slice of the vocabulary, so that
embedding and head load all stages equally. A model runs under it unchanged if it embeds
with `lookup` and its loss uses the logits only through `token_losses` or `head_losses`.
Where `tensor` splits the vocabulary, `lookup` and `head_losses` write its collectives
by hand (`vocabulary_split`). Under any other layout all are the plain functions.

Source: Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism,
  arXiv:2411.05288; Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.
"""

import functools
import math

import jax
import jax.numpy as jnp

from meshpar.arrays import Array, vary
from meshpar.collectives.varying import sum_varying
from meshpar.contracts.purposes import purpose
from meshpar.layouts.axes import PIPE
from meshpar.layouts.scope import constrain, current_scope
from meshpar.ops import blockwise_loss, vocabulary_slices, vocabulary_split
from meshpar.rows.opaque import split_as_arguments


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
    all_reduce of x adds the rows; over `tensor` one reduce_scatter, which splits the
    length of ids[B, L].

    Args:
      w_VD: the embedding, or this device's slice of it.
      ids: integer token ids of any shape.
    """
    size = w_VD.shape[0]
    axis, split = _split_axis("lookup", size), vocabulary_split.split_of(ids, size)
    ids = vocabulary_slices.local_ids(ids, size, axis)
    if split is not None:
        x_D = vocabulary_split.lookup(split, w_VD, ids)
        return x_D if axis is None else _added_rows(axis, x_D)
    if axis is None:
        return w_VD[ids]
    row, in_slice = vocabulary_slices.rows_of(ids, size)
    return _added_rows(axis, jnp.where(in_slice[..., None], w_VD[row], 0))


def _added_rows(axis: str, x_D: Array) -> Array:
    """Adds the rows that all slices of a vocabulary hold.

    Args:
      axis: mesh axis that splits the vocabulary.
      x_D: rows from this device's slice, zeros for other tokens.
    """
    with purpose("activations of the embedding"):
        x_D = sum_varying(x_D, axis)
        # The vjp adds gradients up over the axis here, and not inside the model.
        return vary(x_D, (axis,)) if current_scope().marks_rows else x_D


def logits(x_BLD: Array, w_DV: Array) -> Array:
    """The head: logits[B, L, V], split over the devices that hold the vocabulary.

    Args:
      x_BLD: input of the head.
      w_DV: its weight.
    """
    logits_BLV = jnp.einsum("BLD,DV->BLV", x_BLD, w_DV)
    return constrain(logits_BLV, "batch", "length", "vocab")


def token_losses(logits_BLV: Array, targets_BL: Array) -> Array:
    """Negative log-likelihood of every target, in nats, float32 [B, L].

    The target's logit is picked by comparison, not by indexing: if the vocabulary is
    split, the comparison is local, and two all_reduces of numbers per token follow.

    Args:
      logits_BLV: logits of the vocabulary, or of this device's slice of it.
      targets_BL: integer token ids.
    """
    size = logits_BLV.shape[-1]
    axis, logits_BLV = _split_axis("token_losses", size), logits_BLV.astype(jnp.float32)
    ids_BL = vocabulary_slices.local_ids(targets_BL, size, axis)
    is_target_BLV = vocabulary_slices.is_target(ids_BL, size)
    if axis is None:
        target_BL = jnp.sum(jnp.where(is_target_BLV, logits_BLV, 0.0), axis=-1)
        return jax.nn.logsumexp(logits_BLV, axis=-1) - target_BL
    own = vocabulary_slices.statistics_of(logits_BLV, is_target_BLV)
    return vocabulary_slices.losses_of(own, axis)[0]


def head_losses(x_BLD: Array, w_DV: Array, targets_BL: Array, block: int = 0) -> Array:
    """`token_losses` of the head x w, with the logits of some tokens at a time.

    Memory holds the logits of one block, [B, block, V], instead of [B, L, V]. The
    backward pass computes them again. With blocks, and where `tensor` splits the
    vocabulary, there are reverse-mode derivatives alone: use block=0 for others.

    Args:
      x_BLD: input of the head.
      w_DV: the head; its gradient is summed over the blocks in float32.
      targets_BL: integer token ids.
      block: most tokens of each sequence in a block, fewer where it does not divide L;
        0 for all.
    """
    length, vocab = x_BLD.shape[1], w_DV.shape[1]
    # A device may hold a part of each sequence.
    size = math.gcd(block or length, length)
    split = vocabulary_split.split_of(targets_BL, vocab)
    if split is None and not block:
        x_BLD = constrain(x_BLD, "batch", "length", "embed")
        return token_losses(logits(x_BLD, w_DV), targets_BL)
    axis = _split_axis("token_losses", vocab)
    ids_BL = vocabulary_slices.local_ids(targets_BL, vocab, axis)
    # Gather w along D before the loop: inside it, every block would gather it again.
    w_DV = constrain(w_DV, None, "vocab")
    if split is not None:
        x_BLD = constrain(x_BLD, "batch", "residual_length", "embed")
        return vocabulary_split.losses(split, axis, size, x_BLD, w_DV, ids_BL)
    x_BLD = constrain(x_BLD, "batch", "length", "embed")
    losses = functools.partial(blockwise_loss.losses, logits, axis, size)
    return split_as_arguments(losses, x_BLD, w_DV, ids_BL)
