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
from jax import lax

from meshpar.arrays import Array
from meshpar.collectives.varying import sum_varying
from meshpar.layouts.axes import PIPE
from meshpar.layouts.scope import constrain, current_scope
from meshpar.ops import vocabulary_split
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
    if (axis := _split_axis("lookup", size)) is None:
        split = vocabulary_split.split_of(ids, size)
        return w_VD[ids] if split is None else vocabulary_split.lookup(split, w_VD, ids)
    row = ids - lax.axis_index(axis) * size
    in_slice = (row >= 0) & (row < size)
    x_D = w_VD[jnp.clip(row, 0, size - 1)]
    return sum_varying(jnp.where(in_slice[..., None], x_D, jnp.zeros_like(x_D)), axis)


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


def head_losses(x_BLD: Array, w_DV: Array, targets_BL: Array, block: int = 0) -> Array:
    """`token_losses` of the head x w, with the logits of some tokens at a time.

    Memory holds the logits of one block, [B, block, V], instead of [B, L, V]. The
    backward pass computes them again.

    Args:
      x_BLD: input of the head.
      w_DV: the head; its gradient is summed over the blocks in float32.
      targets_BL: integer token ids.
      block: most tokens of each sequence in a block, fewer where it does not divide L;
        0 for all.
    """
    length = x_BLD.shape[1]
    # A device may hold a part of each sequence.
    size = math.gcd(block or length, length)
    if split := vocabulary_split.split_of(targets_BL, w_DV.shape[1]):
        x_BLD = constrain(x_BLD, "batch", "residual_length", "embed")
        w_DV = constrain(w_DV, None, "vocab")
        _split_axis("token_losses", w_DV.shape[1])
        return vocabulary_split.losses(split, size, x_BLD, w_DV, targets_BL)
    x_BLD = constrain(x_BLD, "batch", "length", "embed")
    if not block:
        return token_losses(logits(x_BLD, w_DV), targets_BL)
    # Gather w along D before the loop: inside it, every block would gather it again.
    w_DV = constrain(w_DV, None, "vocab").astype(jnp.float32)
    losses = functools.partial(_blockwise_losses, block=size)
    return split_as_arguments(losses, x_BLD, w_DV, targets_BL)


def _blockwise_losses(
    x_BLD: Array, w_DV: Array, targets_BL: Array, block: int
) -> Array:
    """The loss of every token, float32 [B, L]."""

    def split(x_BL: Array) -> Array:
        blocks = x_BL.reshape(x_BL.shape[0], -1, block, *x_BL.shape[2:])
        return blocks.swapaxes(0, 1)

    @jax.checkpoint
    def block_losses(_: None, inputs: tuple[Array, Array]) -> tuple[None, Array]:
        x_BCD, targets_BC = inputs
        logits_BCV = logits(x_BCD, w_DV.astype(x_BCD.dtype))
        return None, token_losses(logits_BCV, targets_BC)

    _, losses = lax.scan(block_losses, None, (split(x_BLD), split(targets_BL)))
    return losses.swapaxes(0, 1).reshape(targets_BL.shape)
