"""Collectives in steps: around the rings of a torus, or along binomial trees."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.collectives.patterns import check_divides, only_from
from meshpar.errors import MeshparError


def _check_torus(axis: str, shape: tuple[int, ...]) -> None:
    if math.prod(shape) != (n := lax.axis_size(axis)):
        raise MeshparError(
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
    x: Array, axis: str, shape: tuple[int, ...], dim: int = 0, folded: bool = False
) -> Array:
    """`all_gather` around the rings of a torus, the last dim first.

    It takes sum(shape) - len(shape) steps and moves the same bytes as one ring. Each
    step can overlap with compute.

    Args:
      x: this device's part.
      axis: one mesh axis.
      shape: shape of the torus that the devices of the axis form, in row order.
      dim: dim along which the parts are joined.
      folded: whether all first halves of the parts come first, then all second halves
        in the reverse order of the devices.

    Raises:
      MeshparError: the shape does not have the size of the axis.
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
            number = (place - step) % size
            pieces = jnp.split(x, 2, dim) if folded else [x]
            for piece, start in zip(
                pieces, _starts(number, size, length, folded), strict=True
            ):
                out = lax.dynamic_update_slice_in_dim(out, piece, start, dim)
        x = out
    return x


def _starts(number: Array, size: int, length: int, folded: bool) -> list[Array]:
    """Where one of `size` parts begins in the whole; folded, where its halves do."""
    if not folded:
        return [number * length]
    half = length // 2
    return [number * half, (2 * size - 1 - number) * half]


def ring_reduce_scatter(x: Array, axis: str, dim: int = 0) -> Array:
    """`reduce_scatter` as n-1 steps around a ring; sums in ring order.

    Args:
      x: this device's addend.
      axis: one mesh axis.
      dim: dim that is scattered.

    Raises:
      MeshparError: the dim does not divide over the axis.
    """
    return torus_reduce_scatter(x, axis, (lax.axis_size(axis),), dim)


def torus_reduce_scatter(
    x: Array,
    axis: str,
    shape: tuple[int, ...],
    dim: int = 0,
    loop: bool = False,
    folded: bool = False,
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
      folded: whether the parts lie in x as `torus_all_gather` leaves folded ones.

    Raises:
      MeshparError: the dim does not divide over the axis, or the shape does not have
        the size of the axis.
    """
    check_divides("reduce_scatter by rings", x, axis, dim)
    _check_torus(axis, shape)
    for ring in _rings(axis, shape):
        x = _reduce(_cut(x, ring, dim, folded), axis, ring, loop)
    return x


PartOfSum = Callable[[Array | int, int, Array | None], Array]
"""(number, size, total): one of `size` equal parts of this device's addend, added to
the total of the part unless that is None."""


def torus_reduce_scatter_of(
    part: PartOfSum, axis: str, shape: tuple[int, ...], dim: int = 0
) -> Array:
    """`torus_reduce_scatter` of an addend that is made part by part.

    Args:
      part: makes the parts along `dim` that go around the first ring; called once for
        each.
      axis: one mesh axis.
      shape: shape of the torus that the devices of the axis form, in row order.
      dim: dim that is scattered.
    """
    _check_torus(axis, shape)
    first, *others = _rings(axis, shape)
    x = _reduce(lambda number, total: part(number, first[1], total), axis, first)
    for ring in others:
        x = _reduce(_cut(x, ring, dim), axis, ring)
    return x


def _reduce(
    part: Callable[[Array, Array | None], Array],
    axis: str,
    ring: tuple[Array, int, list],
    loop: bool = False,
) -> Array:
    """`reduce_scatter` around one ring: partial sums go around, and parts are added.

    Args:
      part: (number, total) -> this device's part of that number, added to the total.
      axis: one mesh axis.
      ring: one of `_rings`.
      loop: as in `torus_reduce_scatter`.
    """
    place, size, pairs = ring

    def step(number: int | Array, total: Array) -> Array:
        received = lax.ppermute(total, axis, pairs)
        return part((place - 1 - number) % size, received)

    total = part((place - 1) % size, None)
    if loop:
        return lax.fori_loop(1, size, step, total)
    for number in range(1, size):
        total = step(number, total)
    return total


def _cut(
    x: Array, ring: tuple[Array, int, list], dim: int, folded: bool = False
) -> Callable[[Array, Array | None], Array]:
    """The parts of an array, for `_reduce`."""
    size = ring[1]
    length = x.shape[dim] // size
    piece = length // 2 if folded else length

    def part(number: Array, total: Array | None) -> Array:
        starts = _starts(number, size, length, folded)
        pieces = [lax.dynamic_slice_in_dim(x, start, piece, dim) for start in starts]
        own = lax.concatenate(pieces, dim) if folded else pieces[0]
        return own if total is None else total + own

    return part


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
