"""Collectives in steps: around the rings of a torus, or along binomial trees."""

import functools
import math

import jax
from jax import lax

from meshpar.arrays import Array
from meshpar.collectives.patterns import check_divides, only_from


def _check_torus(axis: str, shape: tuple[int, ...]) -> None:
    if math.prod(shape) != (n := lax.axis_size(axis)):
        raise ValueError(
            f"a torus of shape {shape} does not have the {n} devices of axis {axis!r}"
        )


def _rings(axis: str, shape: tuple[int, ...]) -> list[tuple[Array, int, list]]:
    """The rings through a device, one per dim of a torus in row order.

    Returns:
      For each ring the device's place, the ring's size, and (sender, receiver) pairs.
    """
    i, rings, stride = lax.axis_index(axis), [], math.prod(shape)
    for size in shape:
        whole, stride = stride, stride // size
        pairs = [
            (j, j // whole * whole + (j + stride) % whole)
            for j in range(math.prod(shape))
        ]
        rings.append((i // stride % size, size, pairs))
    return rings


def ring_all_gather(x: Array, axis: str, dim: int = 0) -> Array:
    """`all_gather` as n-1 steps around a ring; each step can overlap with compute.

    Args:
      x: this device's part.
      axis: one mesh axis.
      dim: dim along which the parts are joined.
    """
    return torus_all_gather(x, axis, (lax.axis_size(axis),), dim)


def torus_all_gather(
    x: Array, axis: str, shape: tuple[int, ...], dim: int = 0
) -> Array:
    """`all_gather` around the rings of a torus, the last dim first.

    It takes sum(shape) - len(shape) steps and moves the same bytes as one ring. Each
    step can overlap with compute.

    Args:
      x: this device's part.
      axis: one mesh axis.
      shape: shape of the torus that the devices of the axis form, in row order.
      dim: dim along which the parts are joined.

    Raises:
      ValueError: the shape does not have the size of the axis.
    """
    _check_torus(axis, shape)
    for place, size, pairs in reversed(_rings(axis, shape)):
        length = x.shape[dim]
        whole = (*x.shape[:dim], size * length, *x.shape[dim + 1 :])
        # Every entry is written below; TPUs take long to write zeros first.
        out = lax.pcast(lax.empty(whole, x.dtype), _missing(x, axis), to="varying")
        for step in range(size):
            if step:
                x = lax.ppermute(x, axis, pairs)
            start = (place - step) % size * length
            out = lax.dynamic_update_slice_in_dim(out, x, start, dim)
        x = out
    return x


def ring_reduce_scatter(x: Array, axis: str, dim: int = 0) -> Array:
    """`reduce_scatter` as n-1 steps around a ring; sums in ring order.

    Args:
      x: this device's addend.
      axis: one mesh axis.
      dim: dim that is scattered.

    Raises:
      ValueError: the dim does not divide over the axis.
    """
    return torus_reduce_scatter(x, axis, (lax.axis_size(axis),), dim)


def torus_reduce_scatter(
    x: Array, axis: str, shape: tuple[int, ...], dim: int = 0, loop: bool = False
) -> Array:
    """`reduce_scatter` around the rings of a torus, the first dim first.

    It takes sum(shape) - len(shape) steps and moves the same bytes as one ring. Each
    step can overlap with compute.

    Args:
      x: this device's addend.
      axis: one mesh axis.
      shape: shape of the torus that the devices of the axis form, in row order.
      dim: dim that is scattered.
      loop: whether the steps of a ring are a loop, which compiles fast but does not
        overlap with compute.

    Raises:
      ValueError: the dim does not divide over the axis, or the shape does not have the
        size of the axis.
    """
    check_divides("reduce_scatter by rings", x, axis, dim)
    _check_torus(axis, shape)
    for ring in _rings(axis, shape):
        place, size, _ = ring
        ring_step = functools.partial(_reduce_step, x=x, axis=axis, ring=ring, dim=dim)
        x = _part(x, place - 1, size, dim)
        if loop:
            x = lax.fori_loop(1, size, ring_step, x)
        else:
            for step in range(1, size):
                x = ring_step(step, x)
    return x


def _reduce_step(
    step: int | Array,
    total: Array,
    x: Array,
    axis: str,
    ring: tuple[Array, int, list],
    dim: int,
) -> Array:
    """Passes the partial sum along the ring and adds this device's part."""
    place, size, pairs = ring
    received = lax.ppermute(total, axis, pairs)
    return received + _part(x, place - 1 - step, size, dim)


def _part(x: Array, number: Array, size: int, dim: int) -> Array:
    """One of `size` equal parts of x; its number is taken modulo size."""
    length = x.shape[dim] // size
    return lax.dynamic_slice_in_dim(x, number % size * length, length, dim)


def ring_all_reduce(x: Array, axis: str, dim: int = 0) -> Array:
    """`all_reduce` as a ring reduce_scatter and a ring all_gather: 2(n-1) steps."""
    return ring_all_gather(ring_reduce_scatter(x, axis, dim), axis, dim)


def tree_broadcast(x: Array, axis: str, root: int = 0) -> Array:
    """`broadcast` along a binomial tree: ceil(log2 n) steps of the whole payload."""
    n, reached = lax.axis_size(axis), 1
    x = only_from(x, axis, root)
    while reached < n:
        senders = range(min(reached, n - reached))
        pairs = [((root + s) % n, (root + s + reached) % n) for s in senders]
        x = x + lax.ppermute(x, axis, pairs)
        reached *= 2
    return x


def tree_all_reduce(x: Array, axis: str) -> Array:
    """`all_reduce` up and down a binomial tree: 2 ceil(log2 n) steps."""
    n, stride = lax.axis_size(axis), 1
    while stride < n:
        pairs = [(s + stride, s) for s in range(0, n - stride, 2 * stride)]
        x = x + lax.ppermute(x, axis, pairs)
        stride *= 2
    return tree_broadcast(x, axis)


def _missing(x: Array, axis: str) -> tuple[str, ...]:
    """Manual axes over which a constant must be marked as varying to combine with x."""
    return tuple(sorted({axis, *jax.typeof(x).manual_axis_type.varying}))
