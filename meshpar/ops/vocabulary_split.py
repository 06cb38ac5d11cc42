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
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, num_bytes, vary_alike
from meshpar.layouts.axes import PIPE
from meshpar.layouts.moves import EMBEDDING, HEAD
from meshpar.layouts.scope import current_scope
from meshpar.ops.tensor_split import Split

_WHOLE = PartitionSpec()


def split_of(ids_BL: Array, size: int) -> Split | None:
    """How devices split a vocabulary; None to leave it to the compiler.

    That is so in pipelines, too, whose stages may run embedding and head or not.

    Args:
      ids_BL: token ids.
      size: tokens of the vocabulary.
    """
    scope = current_scope()
    if scope is None or ids_BL.ndim != 2 or PIPE in scope.manual_axes:
        return None
    return Split.of(ids_BL, "embed", ("vocab",), size)


def lookup(split: Split, w_VD: Array, ids_BL: Array) -> Array:
    """Rows of an embedding by token id, with their length split."""
    w_VD, ids_BL = vary_alike(w_VD, ids_BL)
    shape = *ids_BL.shape, w_VD.shape[1]
    _record(split, jax.ShapeDtypeStruct(shape, w_VD.dtype), EMBEDDING)
    return _lookup(split, len(w_VD) // split.ways, w_VD, ids_BL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _lookup(split: Split, size: int, w_VD: Array, ids_BL: Array) -> Array:
    def rows(w_KD: Array, ids_BL: Array) -> Array:
        row_BL, in_slice_BL = _in_slice(split, ids_BL, size)
        x_BLD = jnp.where(in_slice_BL[..., None], w_KD[row_BL], 0)
        return _reduce_scattered(split, x_BLD)

    first, second = PartitionSpec(split.axis), PartitionSpec(None, split.axis)
    return split.mapped(rows, (first, _WHOLE), second)(w_VD, ids_BL)


def _lookup_forward(
    split: Split, size: int, w_VD: Array, ids_BL: Array
) -> tuple[Array, Array]:
    return _lookup(split, size, w_VD, ids_BL), ids_BL


def _lookup_backward(
    split: Split, size: int, ids_BL: Array, dx_BLD: Array
) -> tuple[Array, None]:
    def gradient(dx_BKD: Array, ids_BL: Array) -> Array:
        row_BL, in_slice_BL = _in_slice(split, ids_BL, size)
        dx_BLD = jnp.where(in_slice_BL[..., None], split.whole(dx_BKD), 0)
        zeros_KD = jnp.zeros((size, dx_BLD.shape[-1]), dx_BLD.dtype)
        return zeros_KD.at[row_BL].add(dx_BLD)

    first, second = PartitionSpec(split.axis), PartitionSpec(None, split.axis)
    return split.mapped(gradient, (second, _WHOLE), first)(dx_BLD, ids_BL), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def losses(
    split: Split, block: int, x_BLD: Array, w_DV: Array, targets_BL: Array
) -> Array:
    """Losses of all tokens, float32 [B, L], with the logits of one block at a time.

    Args:
      split: how devices split the vocabulary.
      block: tokens of each sequence in a block; divides L.
      x_BLD: input of the head, with its length split.
      w_DV: the head.
      targets_BL: token ids.
    """
    x_BLD, w_DV, targets_BL = vary_alike(x_BLD, w_DV, targets_BL)
    _record(split, x_BLD, HEAD)
    size = 4 * targets_BL.size
    # A compiler may send maxima in the dtype of the activations.
    split.record_reduced(size, "maxima of logits", HEAD, optional=True)
    split.record_reduced(2 * size, "sums over logits", HEAD, optional=False)
    return _losses(split, block, x_BLD, w_DV, targets_BL)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _losses(
    split: Split, block: int, x_BLD: Array, w_DV: Array, targets_BL: Array
) -> Array:
    return _losses_forward(split, block, x_BLD, w_DV, targets_BL)[0]


def _losses_forward(
    split: Split, block: int, x_BLD: Array, w_DV: Array, targets_BL: Array
) -> tuple[Array, tuple]:
    def forward(x_BKD: Array, w_DK: Array, targets_BL: Array) -> tuple[Array, ...]:
        x_BLD = split.whole(x_BKD)

        def of_block(_: None, inputs: tuple[Array, Array]) -> tuple[None, Any]:
            logits_BCK, is_target_BCK = _logits(split, w_DK, *inputs)
            max_BC = jnp.max(logits_BCK, -1)
            sum_BC = jnp.sum(jnp.exp(logits_BCK - max_BC[..., None]), -1)
            target_BC = jnp.sum(jnp.where(is_target_BCK, logits_BCK, 0), -1)
            return None, (max_BC, sum_BC, target_BC)

        parts = lax.scan(of_block, None, _blocks(block, x_BLD, targets_BL))[1]
        own_BL, sum_BL, target_BL = map(_joined, parts)
        max_BL = lax.pmax(own_BL, split.axis)
        sums = jnp.stack([sum_BL * jnp.exp(own_BL - max_BL), target_BL])
        sum_BL, target_BL = lax.psum(sums, split.axis)
        log_BL = jnp.log(sum_BL) + max_BL
        return log_BL - target_BL, log_BL, x_BLD

    second = PartitionSpec(None, split.axis)
    run = split.mapped(forward, (second, second, _WHOLE), (_WHOLE, _WHOLE, _WHOLE))
    losses_BL, log_BL, whole_BLD = run(x_BLD, w_DV, targets_BL)
    return losses_BL, (whole_BLD, w_DV, targets_BL, log_BL)


def _losses_backward(
    split: Split, block: int, saved: tuple[Array, ...], d_BL: Array
) -> tuple[Array, Array, None]:
    def backward(
        x_BLD: Array, w_DK: Array, targets_BL: Array, log_BL: Array, d_BL: Array
    ) -> tuple[Array, Array]:
        def of_block(dw_DK: Array, inputs: tuple[Array, ...]) -> tuple[Array, Array]:
            x_BCD, targets_BC, log_BC, d_BC = inputs
            logits_BCK, is_target_BCK = _logits(split, w_DK, x_BCD, targets_BC)
            share_BCK = jnp.exp(logits_BCK - log_BC[..., None])
            dy_BCK = (share_BCK - is_target_BCK) * d_BC[..., None]
            dy_BCK = dy_BCK.astype(x_BCD.dtype)
            dx_BCD = jnp.einsum("BCV,DV->BCD", dy_BCK, w_DK.astype(x_BCD.dtype))
            own_DK = jnp.einsum(
                "BCD,BCV->DV", x_BCD, dy_BCK, preferred_element_type=jnp.float32
            )
            return dw_DK + own_DK, dx_BCD

        zeros = jnp.zeros(w_DK.shape, jnp.float32)
        inputs = _blocks(block, x_BLD, targets_BL, log_BL, d_BL)
        dw_DK, dx = lax.scan(of_block, zeros, inputs)
        dx_BKD = _reduce_scattered(split, _joined(dx))
        return dx_BKD, dw_DK.astype(w_DK.dtype)

    second = PartitionSpec(None, split.axis)
    in_specs = _WHOLE, second, _WHOLE, _WHOLE, _WHOLE
    dx_BLD, dw_DV = split.mapped(backward, in_specs, (second, second))(*saved, d_BL)
    return dx_BLD, dw_DV, None


_losses.defvjp(_losses_forward, _losses_backward)


# Inside shard_map.


def _in_slice(split: Split, ids: Array, size: int) -> tuple[Array, Array]:
    """(rows of this device's slice, whether it holds the tokens)."""
    row = ids - lax.axis_index(split.axis) * size
    return jnp.clip(row, 0, size - 1), (row >= 0) & (row < size)


def _logits(
    split: Split, w_DK: Array, x_BCD: Array, targets_BC: Array
) -> tuple[Array, Array]:
    """(this device's logits of a block in float32, which of them are targets)."""
    w_DK = w_DK.astype(x_BCD.dtype)
    logits_BCK = jnp.einsum("BCD,DV->BCV", x_BCD, w_DK).astype(jnp.float32)
    size = w_DK.shape[1]
    ids_K = jnp.arange(size) + lax.axis_index(split.axis) * size
    return logits_BCK, targets_BC[..., None] == ids_K[None, None]


def _blocks(block: int, *arrays: Array) -> tuple[Array, ...]:
    """Arrays [B, L, ...] as blocks [L / C, B, C, ...]."""
    return tuple(
        x.reshape(x.shape[0], -1, block, *x.shape[2:]).swapaxes(0, 1) for x in arrays
    )


def _joined(blocks: Array) -> Array:
    """The inverse of `_blocks`."""
    x = blocks.swapaxes(0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _reduce_scattered(split: Split, x_BLD: Array) -> Array:
    """This device's part of the length of a sum over devices."""
    wire = x_BLD.astype(split.transports.wire_dtype(x_BLD.dtype))
    transport = split.transports.gradients
    return transport.reduce_scatter(wire, (split.axis,), 1).astype(x_BLD.dtype)


def _record(split: Split, x_BLD: Any, part: str) -> None:
    """Notes what embedding or head moves of the residual stream, both ways."""
    dtype = split.transports.wire_dtype(x_BLD.dtype)
    size = num_bytes(jax.ShapeDtypeStruct(x_BLD.shape, dtype))
    split.record_part("all_gather", size, part, in_backward=part == EMBEDDING)
    split.record_part("reduce_scatter", size, part, in_backward=part == HEAD)
