"""Matmuls in steps, beside the collective before or after them (collective matmul).

The functions are called inside a shard_map that does not type varying axes. Suffixes:
B sequences, L the length of a sequence, K a device's part of it, D its features, F what
a weight has in place of them: one dim or more.

Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition
  in Large Deep Learning Models, ASPLOS 2023, section 3.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.contracts.purposes import gathers
from meshpar.mesh.order import computed
from meshpar.mesh.platform import traced_platform


def contract(x: Array, w: Array, dims: int = 1, dtype: Any = None) -> Array:
    """Contracts the last dims of x with the first of w.

    Args:
      x: one operand, [B, L, ...]; no automatic axis splits L.
      w: the other.
      dims: number of dims that are contracted.
      dtype: of the result; by default that of the operands.
    """
    if not traced_platform().multiplies_matrices:
        return jnp.tensordot(x, w, dims, preferred_element_type=dtype)
    size, free = math.prod(w.shape[:dims]), x.ndim - dims
    matrices = x.reshape(-1, size), w.reshape(size, -1)
    y = jnp.matmul(*matrices, preferred_element_type=dtype)
    return y.reshape(*x.shape[:free], *w.shape[dims:])


def weight_gradient(x: Array, dy: Array, dtype: Any = None) -> Array:
    """Contracts x[B, L, ...] with dy[B, L, ...] over B and L.

    Args:
      x: one operand; no automatic axis splits L.
      dy: the other.
      dtype: of the result; by default that of the operands.
    """
    if not traced_platform().multiplies_matrices:
        sums = (0, 1), (0, 1)
        return jnp.tensordot(x, dy, sums, preferred_element_type=dtype)
    rows = x.shape[0] * x.shape[1]
    matrices = x.reshape(rows, -1).T, dy.reshape(rows, -1)
    w = jnp.matmul(*matrices, preferred_element_type=dtype)
    return w.reshape(*x.shape[2:], *dy.shape[2:])


def all_gather_matmul(
    x_BKD: Array, weights: Sequence[Array], axis: str
) -> tuple[list[Array], list[Array]]:
    """Multiplies each part of x when it comes round the ring, while the next one comes.

    Args:
      x_BKD: this device's part of the length.
      weights: w[D, F] each, a part of its own on every device.
      axis: mesh axis of n devices, in the order of the parts.

    Returns:
      (y[B, L, F] of every weight, the parts of x in the order in which they came).
    """
    place, size, _ = _ring(axis)
    length = x_BKD.shape[1]
    shape = len(x_BKD), size * length
    ys = [lax.empty((*shape, *w.shape[1:]), x_BKD.dtype) for w in weights]
    parts = parts_of(x_BKD, axis)
    for step, part in enumerate(parts):
        for i, w in enumerate(weights):
            start = (place - step) % size * length
            ys[i] = lax.dynamic_update_slice_in_dim(ys[i], contract(part, w), start, 1)
    return ys, parts


def parts_of(x_BKD: Array, axis: str) -> list[Array]:
    """Sends x round the ring; gives its parts in the order in which they come.

    Args:
      x_BKD: this device's part.
      axis: mesh axis of n devices, in the order of the parts.
    """
    parts = [x_BKD]
    for _ in range(lax.axis_size(axis) - 1):
        with gathers():
            parts.append(lax.ppermute(parts[-1], axis, _ring(axis)[2]))
    return parts


def weight_gradient_of_parts(
    parts: Sequence[Array], y: Array, axis: str, first: bool
) -> Array:
    """Computes `weight_gradient` of x and y from the parts of x, and adds it up.

    The whole x is never held. Sums are in float32 or wider, and the result has the
    dtype of y.

    Args:
      parts: of x[B, L, ...], in the order of `all_gather_matmul`.
      y: [B, L, ...].
      axis: mesh axis of n devices, in the order of the parts.
      first: whether the dims of x come first in the result.
    """
    place, size, _ = _ring(axis)
    wide = jnp.promote_types(y.dtype, jnp.float32)
    length, total = y.shape[1] // size, None
    for step, part in enumerate(parts):
        start = (place - step) % size * length
        own = lax.dynamic_slice_in_dim(y, start, length, 1)
        pair = (part, own) if first else (own, part)
        addend = weight_gradient(*pair, dtype=wide)
        total = addend if total is None else total + addend
    return total.astype(y.dtype)


def matmul_reduce_scatter(
    ys: Sequence[Array], weights: Sequence[Array], axis: str
) -> Array:
    """Sums products over devices, each part of the length when its sum comes round.

    Addends and sums have the dtype of y, as those of a reduce_scatter.

    Args:
      ys: y[B, L, F] each.
      weights: w[F, D] for every y.
      axis: mesh axis of n devices; n divides L.

    Returns:
      This device's part of the sum over devices and pairs of y w, [B, K, D].
    """
    place, size, ring = _ring(axis)
    part, dtype, total = ys[0].shape[1] // size, ys[0].dtype, None
    for step in range(size):
        start = (place - 1 - step) % size * part
        addends = [] if total is None else [lax.ppermute(total, axis, ring)]
        for y, w in zip(ys, weights, strict=True):
            rows = lax.dynamic_slice_in_dim(y, start, part, 1)
            addends.append(contract(rows, w, w.ndim - 1))
        if len(addends) == 2 and total is not None:
            # Fused with the sum, the only matmul of a step would wait for what comes.
            addends[1] = computed(addends[1])
        total = _sum(addends).astype(dtype)
    return total


def _ring(axis: str) -> tuple[Array, int, list[tuple[int, int]]]:
    """(a device's place, the number of places, (sender, receiver) pairs)."""
    size = lax.axis_size(axis)
    return lax.axis_index(axis), size, [(i, (i + 1) % size) for i in range(size)]


def _sum(addends: Sequence[Array]) -> Array:
    """The sum, in float32 or wider if there is more than one addend."""
    first, *others = addends
    wide = jnp.promote_types(first.dtype, jnp.float32)
    for x in others:
        first = first.astype(wide) + x.astype(wide)
    return first
