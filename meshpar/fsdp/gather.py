"""Fully sharded data parallelism (ZeRO-1, 2, 3) inside shard_map: gather and scatter.

A tensor of the training state is split over the manual axes of the mesh as its
`Placement` says. `gather` makes it whole before use; its transpose is the
reduce-scatter of the gradient, so ZeRO-3 is `gather` inside the layer. Small tensors
travel together in buckets of constant size.

Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, sections 5 and 6.2 (buckets);
  Zhao et al., PyTorch FSDP, arXiv:2304.11277.
"""

import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from meshpar import collectives
from meshpar.arrays import Array, Params
from meshpar.collectives.transport import NO_RINGS, Rings
from meshpar.fsdp.buckets import TILE, is_large, make_buckets, padding
from meshpar.fsdp.sharding import ManualSharding, on_local_shards


def gather_shards(
    shards: Params, shardings: Mapping[str, ManualSharding], rings: Rings = NO_RINGS
) -> Params:
    """Makes tensors whole; its transpose is `reduce_scatter`.

    W[D_fsdp, F] -> W[D, F] for every path. Communication: (n-1)/n of the whole bytes
    received per device.

    Args:
      shards: {path: this device's shard}; call inside shard_map.
      shardings: of the same paths.
      rings: for large tensors.

    Returns:
      {path: whole tensor}, equal on all devices of the axes that split it.
    """
    move = functools.partial(_gather, shardings=shardings, rings=rings)
    return on_local_shards(move, shards, shardings)


def _gather(
    shards: Params, shardings: Mapping[str, ManualSharding], rings: Rings
) -> Params:
    split = {path: x for path, x in shards.items() if shardings[path].splits}
    whole = dict(shards)
    for axes in dict.fromkeys(shardings[path].axes for path in split):
        group = {path: x for path, x in split.items() if shardings[path].axes == axes}
        n = lax.axis_size(axes)
        for paths in make_buckets(group, shardings, n):
            if len(paths) > 1:
                whole |= _gather_bucket({p: group[p] for p in paths}, shardings, n)
                continue
            x = group[paths[0]]
            around = rings if is_large(n * x.nbytes) else NO_RINGS
            for dim, dim_axes in shardings[paths[0]].splits:
                x = _gather_dim(x, dim, dim_axes, around)
            whole[paths[0]] = x
    return whole


def _gather_dim(x: Array, dim: int, axes: tuple[str, ...], rings: Rings) -> Array:
    if rings.has(axes):
        return collectives.torus_all_gather(x, axes[0], rings.shapes[axes[0]], dim)
    return lax.all_gather(x, axes, axis=dim, tiled=True)


def _gather_bucket(
    shards: Params, shardings: Mapping[str, ManualSharding], n: int
) -> Params:
    axes = shardings[next(iter(shards))].axes
    flat = jnp.concatenate([x.reshape(-1) for x in shards.values()])
    rows, start, whole = lax.all_gather(flat, axes), 0, {}
    for path, x in shards.items():
        ((dim, _),) = shardings[path].splits
        part = rows[:, start : start + x.size].reshape(n, *x.shape)
        start += x.size
        shape = (*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :])
        whole[path] = jnp.moveaxis(part, 0, dim).reshape(shape)
    return whole


def reduce_scatter_grads(
    whole: Params, shardings: Mapping[str, ManualSharding], rings: Rings = NO_RINGS
) -> Params:
    """Sums tensors over the axes that split them; every device keeps its shard.

    W[D, F] of every device -> W[D_fsdp, F] of the sum: the transpose of `gather`.
    Communication: (n-1)/n of the whole bytes sent per device.

    Args:
      whole: {path: this device's addend}; call inside shard_map.
      shardings: of the same paths.
      rings: for all of them.
    """
    scatter = functools.partial(_reduce_scatter, shardings=shardings, rings=rings)
    return on_local_shards(scatter, whole, shardings)


def _scatter_rows(rows: Array, axes: tuple[str, ...], rings: Rings) -> Array:
    if rings.has(axes):
        shape = rings.shapes[axes[0]]
        return collectives.torus_reduce_scatter(rows, axes[0], shape, loop=rings.loop)
    return lax.psum_scatter(rows, axes, tiled=True)


def _reduce_scatter(
    whole: Params, shardings: Mapping[str, ManualSharding], rings: Rings
) -> Params:
    split = {path: x for path, x in whole.items() if shardings[path].splits}
    shards = dict(whole)
    for axes in dict.fromkeys(shardings[path].axes for path in split):
        group = {path: x for path, x in split.items() if shardings[path].axes == axes}
        n = lax.axis_size(axes)
        for paths in make_buckets(group, shardings, 1):
            if len(paths) > 1:
                shards |= _scatter_bucket(
                    {p: group[p] for p in paths}, shardings, n, rings
                )
                continue
            x = group[paths[0]]
            for dim, dim_axes in shardings[paths[0]].splits:
                x = _scatter_dim(x, dim, dim_axes, rings)
            shards[paths[0]] = x
    return shards


def _scatter_dim(x: Array, dim: int, axes: tuple[str, ...], rings: Rings) -> Array:
    """Reduce-scatters along one dim, as rows of a matrix."""
    n = lax.axis_size(axes)
    shard = (*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :])
    if rings.has(axes) and math.prod(shard[dim:]) < TILE[1]:
        # Columns fewer than a tile's would be padded, those of all devices at once.
        front = jnp.moveaxis(x, dim, 0)
        part = _scatter_rows(front.reshape(len(front), -1), axes, rings)
        return jnp.moveaxis(part.reshape(-1, *front.shape[1:]), 0, dim)
    if not dim:
        rows = x.reshape(len(x), -1)
    else:
        # No mere transpose, which the compiler would undo.
        rows = jnp.moveaxis(x.reshape(*x.shape[:dim], n, *shard[dim:]), dim, 0)
        whole_tiles = math.prod(shard) % TILE[0] == 0
        rows = rows.reshape(n * (TILE[0] if whole_tiles else 1), -1)
    return _scatter_rows(rows, axes, rings).reshape(shard)


def _scatter_bucket(
    whole: Params, shardings: Mapping[str, ManualSharding], n: int, rings: Rings
) -> Params:
    rows, shapes = [], {}
    for path, x in whole.items():
        ((dim, _),) = shardings[path].splits
        shapes[path] = (*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :])
        x = x.reshape(*x.shape[:dim], n, *shapes[path][dim:])
        rows.append(jnp.moveaxis(x, dim, 0).reshape(n, -1))
    axes, start, shards = shardings[next(iter(whole))].axes, 0, {}
    flat = jnp.concatenate(rows, axis=1)
    if added := padding(flat.shape[1]):
        flat = jnp.pad(flat, ((0, 0), (0, added)))
    if flat.shape[1] % math.prod(TILE) == 0:
        flat = flat.reshape(n * TILE[0], -1)
    flat = _scatter_rows(flat, axes, rings).reshape(-1)
    for path, shape in shapes.items():
        size = math.prod(shape)
        shards[path] = flat[start : start + size].reshape(shape)
        start += size
    return shards


def all_reduce_grads(tree: Params, shardings: Mapping[str, ManualSharding]) -> Params:
    """Sums tensors over the manual axes that do not split them, small ones together."""
    return on_local_shards(
        functools.partial(_all_reduce, shardings=shardings), tree, shardings
    )


def _all_reduce(tree: Params, shardings: Mapping[str, ManualSharding]) -> Params:
    summed = {}
    for axes in dict.fromkeys(shardings[path].rest for path in tree):
        group = {path: x for path, x in tree.items() if shardings[path].rest == axes}
        if not axes:
            summed |= group
            continue
        for paths in make_buckets(group, shardings, 1):
            if len(paths) == 1:
                summed[paths[0]] = lax.psum(group[paths[0]], axes)
                continue
            flat = jnp.concatenate([group[path].reshape(-1) for path in paths])
            flat, start = lax.psum(flat, axes), 0
            for path in paths:
                x = group[path]
                summed[path] = flat[start : start + x.size].reshape(x.shape)
                start += x.size
    return {path: summed[path] for path in tree}


def gather_with(
    gather: Callable[[Params], Params], reduce: Callable[[Params], Params]
) -> Callable[[Params], Params]:
    """A function of leaves whose gradient goes back through `reduce`.

    Whatever whole tensors `gather` returns, their gradient ends up on the leaves: a
    forward pass may use weights that were gathered before (ZeRO-2).
    """

    @jax.custom_vjp
    def whole(leaves: Params) -> Params:
        return gather(leaves)

    whole.defvjp(lambda leaves: (gather(leaves), None), lambda _, g: (reduce(g),))
    return whole
