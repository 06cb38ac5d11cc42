"""One device's slice of a vocabulary: its tokens, and what it knows of their losses.

Suffixes: B sequences, L their length, K tokens of the slice; `...` any dims of tokens.

Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.layouts.moves import HEAD, Move
from meshpar.layouts.scope import current_scope


class Statistics(NamedTuple):
    """What one slice, or several, know of the losses of tokens, float32 [...] each.

    Attributes:
      maxima: the largest logit.
      sums: of exp(logit - maximum).
      targets: the target's logit, 0 where the target is in another slice.
    """

    maxima: Array
    sums: Array
    targets: Array


def from_slice(ids: Array, size: int, axis: str | None) -> Array:
    """Token ids counted from the first one of this device's slice.

    Args:
      ids: token ids.
      size: tokens of a slice.
      axis: mesh axis that splits the vocabulary; None if nothing does.
    """
    return ids if axis is None else ids - lax.axis_index(axis) * size


def rows_of(ids: Array, size: int) -> tuple[Array, Array]:
    """(rows of a slice, whether it holds the tokens) by ids of `from_slice`."""
    return jnp.clip(ids, 0, size - 1), (ids >= 0) & (ids < size)


def is_target(ids: Array, size: int) -> Array:
    """Which tokens of a slice are ids[...] of `from_slice`, bool [..., K]."""
    return ids[..., None] == jnp.arange(size)[(None,) * ids.ndim]


def statistics_of(logits_K: Array, is_target_K: Array) -> Statistics:
    """What a slice knows by its logits, float32 [..., K], and which are targets."""
    maxima = lax.stop_gradient(jnp.max(logits_K, axis=-1))
    # All tokens of a slice may be masked by -inf.
    finite = jnp.where(jnp.isfinite(maxima), maxima, 0.0)
    sums = jnp.sum(jnp.exp(logits_K - finite[..., None]), axis=-1)
    targets = jnp.sum(jnp.where(is_target_K, logits_K, 0.0), axis=-1)
    return Statistics(maxima, sums, targets)


def joined(slices: Statistics, axis: str) -> Statistics:
    """What slices along an axis know together, by two all_reduces."""
    maxima = lax.pmax(slices.maxima, axis)
    own = slices.sums * jnp.exp(slices.maxima - maxima)
    return Statistics(maxima, *lax.psum(jnp.stack([own, slices.targets]), axis))


def losses_of(slices: Statistics, axis: str | None) -> tuple[Array, Array]:
    """(losses, logs of sums of exp(logit) over the whole vocabulary), float32 [...].

    Args:
      slices: what this device's slice knows.
      axis: mesh axis that splits the vocabulary; None if nothing does.
    """
    whole = slices if axis is None else joined(slices, axis)
    logs = jnp.log(whole.sums) + whole.maxima
    return logs - whole.targets, logs


def record_joined(axis: str, targets_BL: Array) -> None:
    """Notes the all_reduces of `joined`, for contracts."""
    size = 4 * targets_BL.size
    # A compiler may send maxima in the dtype of the activations.
    for times, what, optional in ((1, "maxima of logits", True), (2, "sums", False)):
        why = f"{what}, over slices of the vocabulary"
        facts = {"optional": optional, "has_gradient": False, "part": HEAD}
        move = Move("all_reduce", (axis,), times * size, why, **facts)
        current_scope().moves.append(move)
