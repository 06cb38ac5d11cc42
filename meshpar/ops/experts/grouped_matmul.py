"""Grouped matmul by platform: rows in groups, a matrix for each group.

TPUs have `lax.ragged_dot` natively. On CPUs and GPUs it computes every group with every
matrix; there a loop runs over the blocks of rows that are in use.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from meshpar.arrays import Array, vary
from meshpar.layouts.scope import current_scope
from meshpar.layouts.stacks import InStack, place_of
from meshpar.mesh.order import zero_after
from meshpar.mesh.platform import TPU, traced_platform

BLOCK = 64
"""Rows of a block; loops over blocks need groups of whole blocks."""

_LANES = 128
"""Elements of the last dim to whose multiples TPUs pad arrays."""


def in_groups(counts_E: Array, most: int) -> tuple[Array, int]:
    """(rows of each group, rows of all) for `grouped_matmul`.

    Loops over blocks need groups of whole blocks; the kernels of TPUs do not.

    Args:
      counts_E: int32 rows of each group that are in use.
      most: the most that all groups have together.
    """
    num_rows = -(-most // BLOCK) * BLOCK
    if traced_platform() is TPU:
        return counts_E, num_rows
    return -(-counts_E // BLOCK) * BLOCK, num_rows + len(counts_E) * BLOCK


def grouped_matmul(x_SD: Array, w_EDF: Array, sizes_E: Array) -> Array:
    """Multiplies the rows of each group by the matrix of the group.

    x[S, D], w[E, D, F] -> y[S, F]. The groups stand one after the other; rows beyond
    the last one give zeros, whatever they hold. No automatic axis may split x or w: the
    compiler would move them in every round of the loop.

    Args:
      x_SD: rows.
      w_EDF: a matrix for each group.
      sizes_E: int32 rows of each group, by `in_groups`.

    Source: Gale et al., MegaBlocks, arXiv:2211.15841, section 5.1.
    """
    if traced_platform() is TPU:
        return by_ragged_dot(x_SD, w_EDF, sizes_E)
    if scope := current_scope():
        scope.looped_flops.append(2.0 * x_SD.size * w_EDF.shape[-1])
    return in_blocks(x_SD, w_EDF, sizes_E)


def grouped_matmuls(
    x_SD: Array, weights: Sequence[Array], sizes_E: Array
) -> list[Array]:
    """`grouped_matmul` of the same rows with several matrices of equal shapes."""
    if traced_platform() is TPU:
        return list(by_ragged_dots(x_SD, weights, sizes_E))
    return [grouped_matmul(x_SD, w_EDF, sizes_E) for w_EDF in weights]


def by_ragged_dot(x_SD: Array, w_EDF: Array, sizes_E: Array) -> Array:
    """`grouped_matmul` by `lax.ragged_dot`, whose backward pass frees rows early."""
    (y_SF,) = by_ragged_dots(x_SD, (w_EDF,), sizes_E)
    return y_SF


def by_ragged_dots(
    x_SD: Array, weights: Sequence[Array], sizes_E: Array
) -> tuple[Array, ...]:
    """`by_ragged_dot` with several matrices of equal shapes.

    The forward pass reads those whose places in stacks are known where they stand.
    """
    places = tuple(map(place_of, weights))
    return _ragged_dots(x_SD, tuple(weights), places, sizes_E)


@jax.custom_vjp
def _ragged_dots(
    x_SD: Array,
    weights: tuple[Array, ...],
    places: tuple[InStack | None, ...],
    sizes_E: Array,
) -> tuple[Array, ...]:
    return tuple(
        lax.ragged_dot(x_SD, _ordered(w_EDF, backward=False), sizes_E)
        if place is None
        else _of_layer(x_SD, place, sizes_E)
        for w_EDF, place in zip(weights, places, strict=True)
    )


def _of_layer(x_SD: Array, place: InStack, sizes_E: Array) -> Array:
    """`by_ragged_dot` with the matrices of one layer, read in the stack of all.

    They are groups of the whole stack; those of all other layers are empty.
    """
    depth, num_experts, *dims = place.stack.shape
    sizes = (
        jnp.zeros_like(sizes_E, shape=(depth, num_experts)).at[place.row].set(sizes_E)
    )
    stack = with_layout_constraint(place.stack, Layout(range(4)))
    return lax.ragged_dot(x_SD, stack.reshape(-1, *dims), sizes.reshape(-1))


def _ordered(w_EDF: Array, backward: bool, in_stack: bool = False) -> Array:
    """Matrices in the order in memory in which kernels read them.

    By rows, compilers keep the stack of layers in this order too: they copy no slice of
    it to another one in every tick of a pipeline, and hold no second stack where the
    forward pass reads the stack itself. Matrices that a pipeline gathers in every pass
    come by columns where the gradients of rows read them. Elsewhere a gather leaves any
    order.

    Args:
      w_EDF: the matrices.
      backward: whether the gradients of rows read them.
      in_stack: whether the forward pass reads them in the stack.
    """
    scope = current_scope()
    in_ticks = scope is not None and scope.layout.pipe > 1
    if not in_ticks and not in_stack:
        return w_EDF
    gathered = in_ticks and scope.layout.fsdp > 1 and scope.layout.zero_level == 3
    order = (0, 2, 1) if backward and gathered else (0, 1, 2)
    return with_layout_constraint(w_EDF, Layout(order))


def _ragged_forward(
    x_SD: Array,
    weights: tuple[Array, ...],
    places: tuple[InStack | None, ...],
    sizes_E: Array,
) -> tuple[tuple[Array, ...], tuple]:
    results = _ragged_dots(x_SD, weights, places, sizes_E)
    own = tuple(map(_read_backward, weights, places))
    # Holds no arrays: its structure tells the backward pass which ones have a place.
    in_stack = tuple(None if place is None else () for place in places)
    return results, (x_SD, own, in_stack, sizes_E)


def _ragged_backward(
    saved: tuple, gradients: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...], None, None]:
    """Gradients of the weights first: schedulers put them last, and hold the rows."""
    x_SD, own, in_stack, sizes_E = saved
    weights = tuple(
        w_EDF.astype(x_SD.dtype)
        if w_EDF.dtype != x_SD.dtype
        else _ordered(w_EDF, backward=True, in_stack=place is not None)
        for w_EDF, place in zip(own, in_stack, strict=True)
    )

    dweights = tuple(
        _of_weight(x_SD, w_EDF, sizes_E, dy_SF)
        for w_EDF, dy_SF in zip(weights, gradients, strict=True)
    )
    for dw_EDF in dweights:
        sizes_E += zero_after(dw_EDF).astype(sizes_E.dtype)
    if sum(w.size for w in weights) < x_SD.size:
        # One gradient of the rows, and none to add, which is a pass over all of them.
        weights = (jnp.concatenate(weights, axis=-1),)
        gradients = (jnp.concatenate(gradients, axis=-1),)

    def of_rows(w_EDF: Array, dy_SF: Array) -> Array:
        _, vjp = jax.vjp(lambda x: lax.ragged_dot(x, w_EDF, sizes_E), x_SD)
        return vjp(dy_SF)[0]

    dx_SD = functools.reduce(jnp.add, map(of_rows, weights, gradients))
    return dx_SD, dweights, None, None


def _read_backward(w_EDF: Array, place: InStack | None) -> Array:
    """The matrices that the backward pass reads: in their own dtype if by columns."""
    if place is None or place.master is None or not _is_narrow(w_EDF):
        return w_EDF
    return place.master


def _is_narrow(w_EDF: Array) -> bool:
    """Whether TPUs pad rows of the matrices, and would not pad columns."""
    return w_EDF.shape[2] % _LANES > 0 and w_EDF.shape[1] % _LANES == 0


def _of_weight(x_SD: Array, w_EDF: Array, sizes_E: Array, dy_SF: Array) -> Array:
    """Gradient of the matrices; by columns where TPUs would pad their rows."""
    if _is_narrow(w_EDF):
        w_EFD = w_EDF.swapaxes(1, 2)
        _, vjp = jax.vjp(lambda w: lax.ragged_dot(dy_SF, w, sizes_E), w_EFD)
        return vjp(x_SD)[0].swapaxes(1, 2)
    _, vjp = jax.vjp(lambda w: lax.ragged_dot(x_SD, w, sizes_E), w_EDF)
    return vjp(dy_SF)[0]


_ragged_dots.defvjp(_ragged_forward, _ragged_backward)


def _blocks(x_SD: Array, sizes_E: Array) -> tuple[Array, Array]:
    """(number of blocks in use, group of every block)."""
    ends_E = jnp.cumsum(sizes_E) // BLOCK
    numbers = jnp.arange(len(x_SD) // BLOCK)
    groups = jnp.sum(numbers[:, None] >= ends_E[None], axis=1)
    return ends_E[-1], jnp.minimum(groups, len(sizes_E) - 1)


def _block(x: Array, i: Array) -> Array:
    return lax.dynamic_slice_in_dim(x, i * BLOCK, BLOCK)


def _put_block(x: Array, block: Array, i: Array) -> Array:
    block = block.astype(x.dtype)
    return lax.dynamic_update_slice_in_dim(x, block, i * BLOCK, axis=0)


def _zeros(shape: tuple[int, ...], dtype: jnp.dtype, *like: Array) -> Array:
    """Zeros that vary over the manual axes of any of the other arrays."""
    axes = {a for x in like for a in jax.typeof(x).manual_axis_type.varying}
    return vary(jnp.zeros(shape, dtype), tuple(axes))


@jax.custom_vjp
def in_blocks(x_SD: Array, w_EDF: Array, sizes_E: Array) -> Array:
    """`grouped_matmul` as a loop over the blocks in use."""
    num, groups = _blocks(x_SD, sizes_E)
    y_SF = _zeros((len(x_SD), w_EDF.shape[-1]), x_SD.dtype, x_SD, w_EDF, sizes_E)

    def body(i: Array, y_SF: Array) -> Array:
        w_DF = lax.dynamic_index_in_dim(w_EDF, groups[i], keepdims=False)
        return _put_block(y_SF, _block(x_SD, i) @ w_DF, i)

    return lax.fori_loop(0, num, body, y_SF)


def _forward(x_SD: Array, w_EDF: Array, sizes_E: Array) -> tuple[Array, tuple]:
    return in_blocks(x_SD, w_EDF, sizes_E), (x_SD, w_EDF, sizes_E)


def _backward(saved: tuple, dy_SF: Array) -> tuple[Array, Array, None]:
    x_SD, w_EDF, sizes_E = saved
    num, groups = _blocks(x_SD, sizes_E)
    like = x_SD, w_EDF, sizes_E, dy_SF
    zeros = (
        _zeros(x_SD.shape, x_SD.dtype, *like),
        _zeros(w_EDF.shape, jnp.float32, *like),
    )

    def body(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        dx_SD, dw_EDF = sums
        e, dy, x = groups[i], _block(dy_SF, i), _block(x_SD, i)
        w_DF = lax.dynamic_index_in_dim(w_EDF, e, keepdims=False)
        new = jnp.matmul(x.T, dy, preferred_element_type=jnp.float32)
        return _put_block(dx_SD, dy @ w_DF.T, i), dw_EDF.at[e].add(new)

    dx_SD, dw_EDF = lax.fori_loop(0, num, body, zeros)
    return dx_SD, dw_EDF.astype(w_EDF.dtype), None


in_blocks.defvjp(_forward, _backward)
