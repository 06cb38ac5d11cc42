"""Embedding and head whose vocabulary `tensor` splits, with collectives by hand.

Between blocks `tensor` splits the length of sequences. Each device looks up the tokens
of its slice, for the whole length, and a reduce_scatter leaves it its part. The head
gathers the length; each device has its slice of the logits, and two small all_reduces
join what the slices know of a token's loss.

Suffixes: B sequences, L their length, K a device's part of a dim, V vocabulary, D
features, C tokens of a block.

Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3; Korthikanti et al.,
  arXiv:2205.05198, section 4.2.2 (sequence parallelism).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, vary_alike
from meshpar.contracts.purposes import purpose
from meshpar.layouts.scope import current_scope
from meshpar.ops import blockwise_loss, vocabulary_slices
from meshpar.ops.tensor_split import MatmulSplit
from meshpar.ops.vocabulary_slices import local_ids

_WHOLE = PartitionSpec()


def split_of(ids_BL: Array, size: int) -> MatmulSplit | None:
    """The split of a vocabulary over devices; None to leave it to the compiler.

    Args:
      ids_BL: token ids.
      size: tokens of the vocabulary.
    """
    if current_scope() is None or ids_BL.ndim != 2:
        return None
    return MatmulSplit.of(ids_BL, "embed", ("vocab",), size)


def lookup(split: MatmulSplit, w_VD: Array, ids_BL: Array) -> Array:
    """Rows of an embedding by token id, with their length split."""
    w_VD, ids_BL = vary_alike(w_VD, ids_BL)
    with purpose("activations of the embedding"):
        return _lookup(split, len(w_VD) // split.ways, w_VD, ids_BL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _lookup(split: MatmulSplit, size: int, w_VD: Array, ids_BL: Array) -> Array:
    def rows(w_KD: Array, ids_BL: Array) -> Array:
        ids_BL = local_ids(ids_BL, size, split.axis)
        row_BL, in_slice_BL = vocabulary_slices.rows_of(ids_BL, size)
        x_BLD = jnp.where(in_slice_BL[..., None], w_KD[row_BL], 0)
        return _reduce_scattered(split, x_BLD)

    first, second = PartitionSpec(split.axis), PartitionSpec(None, split.axis)
    return split.mapped(rows, (first, _WHOLE), second)(w_VD, ids_BL)


def _lookup_forward(
    split: MatmulSplit, size: int, w_VD: Array, ids_BL: Array
) -> tuple[Array, Array]:
    return _lookup(split, size, w_VD, ids_BL), ids_BL


def _lookup_backward(
    split: MatmulSplit, size: int, ids_BL: Array, dx_BLD: Array
) -> tuple[Array, None]:
    def gradient(dx_BKD: Array, ids_BL: Array) -> Array:
        ids_BL = local_ids(ids_BL, size, split.axis)
        row_BL, in_slice_BL = vocabulary_slices.rows_of(ids_BL, size)
        dx_BLD = jnp.where(in_slice_BL[..., None], split.whole(dx_BKD), 0)
        zeros_KD = jnp.zeros((size, dx_BLD.shape[-1]), dx_BLD.dtype)
        return zeros_KD.at[row_BL].add(dx_BLD)

    first, second = PartitionSpec(split.axis), PartitionSpec(None, split.axis)
    return split.mapped(gradient, (second, _WHOLE), first)(dx_BLD, ids_BL), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def losses(
    split: MatmulSplit,
    outer: str | None,
    block: int,
    x_BLD: Array,
    w_DV: Array,
    ids_BL: Array,
) -> Array:
    """Losses of all tokens, float32 [B, L], with the logits of one block at a time.

    Args:
      split: how `tensor` splits the vocabulary, or this stage's slice of it.
      outer: the mesh axis over stages that hold slices; None if a stage holds all.
      block: tokens of each sequence in a block; divides L.
      x_BLD: input of the head, with its length split.
      w_DV: the head, or the stage's slice of it.
      ids_BL: targets, counted from the first token of that slice.
    """
    with purpose("activations of the head"):
        return _losses(split, outer, block, *vary_alike(x_BLD, w_DV, ids_BL))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _losses(split: MatmulSplit, outer: str | None, block: int, *arrays: Array) -> Array:
    return _losses_forward(split, outer, block, *arrays)[0]


def _losses_forward(
    split: MatmulSplit, outer: str | None, block: int, *arrays: Array
) -> tuple[Array, tuple]:
    def forward(x_BKD: Array, w_DK: Array, ids_BL: Array) -> tuple[Any, Array]:
        x_BLD = split.whole(x_BKD)
        ids_BL = local_ids(ids_BL, w_DK.shape[1], split.axis)
        own = blockwise_loss.statistics(_head, block, x_BLD, w_DK, ids_BL)
        return vocabulary_slices.joined(own, split.axis), x_BLD

    second = PartitionSpec(None, split.axis)
    run = split.mapped(forward, (second, second, _WHOLE), (_WHOLE, _WHOLE))
    _, w_DV, ids_BL = arrays
    statistics, whole_BLD = run(*arrays)
    losses_BL, logs_BL = vocabulary_slices.losses_of(statistics, outer)
    return losses_BL, (whole_BLD, w_DV, ids_BL, logs_BL)


def _losses_backward(
    split: MatmulSplit,
    outer: str | None,
    block: int,
    saved: tuple[Array, ...],
    d_BL: Array,
) -> tuple[Array, Array, None]:
    del outer

    def backward(
        x_BLD: Array, w_DK: Array, ids_BL: Array, *numbers_BL: Array
    ) -> tuple[Array, Array]:
        ids_BL = local_ids(ids_BL, w_DK.shape[1], split.axis)
        dx_BLD, dw_DK = blockwise_loss.gradients(
            _head, block, x_BLD, w_DK, ids_BL, *numbers_BL
        )
        return _reduce_scattered(split, dx_BLD), dw_DK

    second = PartitionSpec(None, split.axis)
    in_specs = _WHOLE, second, _WHOLE, _WHOLE, _WHOLE
    args = vary_alike(*saved, d_BL)
    return *split.mapped(backward, in_specs, (second, second))(*args), None


_losses.defvjp(_losses_forward, _losses_backward)


# Inside shard_map.


def _head(x_BCD: Array, w_DK: Array) -> Array:
    """This device's logits of a block."""
    return jnp.einsum("BCD,DK->BCK", x_BCD, w_DK)


def _reduce_scattered(split: MatmulSplit, x_BLD: Array) -> Array:
    """This device's part of the length of a sum over devices."""
    wire = x_BLD.astype(split.transports.wire_dtype(x_BLD.dtype))
    transport = split.transports.gradients
    return transport.reduce_scatter(wire, (split.axis,), 1).astype(x_BLD.dtype)
