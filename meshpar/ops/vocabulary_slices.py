"""One device's slice of a vocabulary: its tokens, and its part of their losses.

Suffixes: B sequences, L their length, K tokens of the slice; `...` any dims of tokens.

Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.contracts.purposes import purpose


class LogitStatistics(NamedTuple):
    """Numbers of each token over one slice of the vocabulary or several, float32 [...].

    Attributes:
      maxima: the largest logit.
      sums: of exp(logit - maximum).
      targets: the target's logit, 0 where the target is in another slice.
    """

    maxima: Array
    sums: Array
    targets: Array


def local_ids(ids: Array, size: int, axis: str | None) -> Array:
    """Token ids counted from the first one of this device's slice.

    Args:
      ids: token ids.
      size: tokens of a slice.
      axis: mesh axis that splits the vocabulary; None if nothing does.
    """
    return ids if axis is None else ids - lax.axis_index(axis) * size


def rows_of(ids: Array, size: int) -> tuple[Array, Array]:
    """(rows of a slice, whether it holds the tokens) by `local_ids`."""
    return jnp.clip(ids, 0, size - 1), (ids >= 0) & (ids < size)


def is_target(ids: Array, size: int) -> Array:
    """Whether each token of a slice is ids[...], counted locally; bool [..., K]."""
    return ids[..., None] == jnp.arange(size)[(None,) * ids.ndim]


def statistics_of(logits_K: Array, is_target_K: Array) -> LogitStatistics:
    """Numbers of each token from a slice's logits, float32 [..., K], and targets."""
    maxima = lax.stop_gradient(jnp.max(logits_K, axis=-1))
    # All tokens of a slice may be masked by -inf.
    finite = jnp.where(jnp.isfinite(maxima), maxima, 0.0)
    sums = jnp.sum(jnp.exp(logits_K - finite[..., None]), axis=-1)
    targets = jnp.sum(jnp.where(is_target_K, logits_K, 0.0), axis=-1)
    return LogitStatistics(maxima, sums, targets)


def joined(slices: LogitStatistics, axis: str) -> LogitStatistics:
    """Numbers over all slices along an axis, by two all_reduces."""
    with purpose("maxima of logits, over slices of the vocabulary"):
        maxima = lax.pmax(slices.maxima, axis)
    own = slices.sums * jnp.exp(slices.maxima - maxima)
    with purpose("sums, over slices of the vocabulary"):
        sums, targets = lax.psum(jnp.stack([own, slices.targets]), axis)
    return LogitStatistics(maxima, sums, targets)


def losses_of(slices: LogitStatistics, axis: str | None) -> tuple[Array, Array]:
    """(losses, logs of sums of exp(logit) over the whole vocabulary), float32 [...].

    Args:
      slices: of this device's slice.
      axis: mesh axis that splits the vocabulary; None if nothing does.
    """
    whole = slices if axis is None else joined(slices, axis)
    logs = jnp.log(whole.sums) + whole.maxima
    return logs - whole.targets, logs
