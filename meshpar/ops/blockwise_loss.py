"""Losses of a head, and its gradients, with the logits of some tokens at a time.

Memory holds logits [B, C, V] instead of [B, L, V]. The backward pass computes them
again, and with the saved log of the sum over the vocabulary it reads them once. The
gradient of the head is added up in float32.

Suffixes: B sequences, L their length, C tokens of a block, D features, K tokens of a
slice of the vocabulary (or all).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array, vary_alike
from meshpar.ops import vocabulary_slices
from meshpar.ops.vocabulary_slices import LogitStatistics

Head = Callable[[Array, Array], Array]
"""(x[B, C, D], w[D, K]) -> logits[B, C, K]."""


def statistics(
    head: Head, block: int, x_BLD: Array, w_DK: Array, ids_BL: Array
) -> LogitStatistics:
    """Numbers of each token over a slice of the vocabulary, float32 [B, L] each.

    Args:
      head: the matmul.
      block: tokens of each sequence in a block; divides L.
      x_BLD: input of the head.
      w_DK: this slice of the head.
      ids_BL: targets, counted from the first token of the slice.
    """

    def of_block(_: None, start: Array) -> tuple[None, LogitStatistics]:
        x_BCD, ids_BC = _block(start, block, x_BLD, ids_BL)
        return None, vocabulary_slices.statistics_of(
            *_logits(head, w_DK, x_BCD, ids_BC)
        )

    blocks = lax.scan(of_block, None, _starts(block, x_BLD))[1]
    return jax.tree.map(_joined, blocks)


def gradients(
    head: Head,
    block: int,
    x_BLD: Array,
    w_DK: Array,
    ids_BL: Array,
    logs_BL: Array,
    d_BL: Array,
) -> tuple[Array, Array]:
    """(gradient of x by this slice, gradient of w).

    Args:
      head: as in `statistics`.
      block: as in `statistics`.
      x_BLD: as in `statistics`.
      w_DK: as in `statistics`.
      ids_BL: as in `statistics`.
      logs_BL: log of the sum of exp(logit) over the whole vocabulary.
      d_BL: gradient of the losses.
    """

    def of_block(sums: tuple[Array, Array], start: Array) -> tuple[Any, None]:
        dx_BLD, dw_DK = sums
        x_BCD, ids_BC, logs_BC, d_BC = _block(
            start, block, x_BLD, ids_BL, logs_BL, d_BL
        )
        logits_BCK, is_target_BCK = _logits(head, w_DK, x_BCD, ids_BC)
        share_BCK = jnp.exp(logits_BCK - logs_BC[..., None])
        dy_BCK = (share_BCK - is_target_BCK) * d_BC[..., None]
        dy_BCK = dy_BCK.astype(x_BCD.dtype)
        dx_BCD = jnp.einsum("BCK,DK->BCD", dy_BCK, w_DK.astype(x_BCD.dtype))
        own_DK = jnp.einsum(
            "BCD,BCK->DK", x_BCD, dy_BCK, preferred_element_type=jnp.float32
        )
        dx_BLD = lax.dynamic_update_slice_in_dim(dx_BLD, dx_BCD, start, 1)
        return (dx_BLD, dw_DK + own_DK), None

    zeros = jnp.zeros_like(x_BLD), jnp.zeros_like(w_DK, jnp.float32)
    (dx_BLD, dw_DK), _ = lax.scan(of_block, zeros, _starts(block, x_BLD))
    return dx_BLD, dw_DK.astype(w_DK.dtype)


def losses(
    head: Head,
    axis: str | None,
    block: int,
    x_BLD: Array,
    w_DK: Array,
    ids_BL: Array,
) -> Array:
    """Losses of all tokens, float32 [B, L].

    Args:
      head: as in `statistics`.
      axis: manual mesh axis that splits the vocabulary; None if nothing does.
      block: as in `statistics`.
      x_BLD: as in `statistics`.
      w_DK: as in `statistics`.
      ids_BL: as in `statistics`.
    """
    return _losses(head, axis, block, *vary_alike(x_BLD, w_DK, ids_BL))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _losses(head: Head, axis: str | None, block: int, *arrays: Array) -> Array:
    return _forward(head, axis, block, *arrays)[0]


def _forward(head: Head, axis: str | None, block: int, *arrays: Array) -> tuple:
    losses_BL, logs_BL = vocabulary_slices.losses_of(
        statistics(head, block, *arrays), axis
    )
    return losses_BL, (*arrays, logs_BL)


def _backward(
    head: Head, axis: str | None, block: int, saved: tuple[Array, ...], d_BL: Array
) -> tuple[Array, Array, None]:
    del axis
    return *gradients(head, block, *vary_alike(*saved, d_BL)), None


_losses.defvjp(_forward, _backward)


def _logits(
    head: Head, w_DK: Array, x_BCD: Array, ids_BC: Array
) -> tuple[Array, Array]:
    """(logits of a block in float32, which of them are targets)."""
    logits_BCK = head(x_BCD, w_DK.astype(x_BCD.dtype)).astype(jnp.float32)
    return logits_BCK, vocabulary_slices.is_target(ids_BC, w_DK.shape[1])


def _starts(block: int, x_BLD: Array) -> Array:
    """The first token of every block."""
    return jnp.arange(0, x_BLD.shape[1], block)


def _block(start: Array, block: int, *arrays: Array) -> tuple[Array, ...]:
    """The part [B, C, ...] of arrays [B, L, ...] from a first token."""
    return tuple(lax.dynamic_slice_in_dim(x, start, block, 1) for x in arrays)


def _joined(blocks: Array) -> Array:
    """Blocks [L / C, B, C] as one array [B, L]."""
    return blocks.swapaxes(0, 1).reshape(blocks.shape[1], -1)
