"""Fully sharded data parallelism (ZeRO-1, 2, 3) inside shard_map: gather and scatter.

`ManualSharding` says how manual mesh axes split a tensor of the training state.
`gather_shards` makes it whole before use. Its transpose is the reduce-scatter of the
gradient, so ZeRO-3 is a gather inside the layer. Small tensors move in buckets.

Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, sections 5 and 6.2 (buckets);
  Zhao et al., PyTorch FSDP, arXiv:2304.11277.
"""

import functools
import math
from collections.abc import Mapping

import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array, Params
from meshpar.collectives.transport import ONE_SHOT, Transport
from meshpar.contracts.purposes import purpose
from meshpar.fsdp.buckets import (
    TILE,
    gather_padding,
    is_gathered_flat,
    make_buckets,
    padding,
)
from meshpar.fsdp.product import Product, whole
from meshpar.fsdp.sharding import ManualSharding, on_local_shards

REPLICATED = "gradients, over the axes that replicate the tensor"


def gather_shards(
    shards: Params,
    shardings: Mapping[str, ManualSharding],
    transport: Transport = ONE_SHOT,
) -> Params:
    """Makes tensors whole; its transpose is `reduce_scatter_grads`.

    W[D_fsdp, F] -> W[D, F] for every path. Communication: (n-1)/n of the whole bytes
    received per device.

    Args:
      shards: {path: this device's shard}; call inside shard_map.
      shardings: {path: how manual axes split it}.
      transport: how the tensors move.

    Returns:
      {path: whole tensor}, equal on all devices of the axes that split it.
    """
    gather = functools.partial(_gather, shardings=shardings, transport=transport)
    return on_local_shards(gather, shards, shardings)


def _gather(
    shards: Params, shardings: Mapping[str, ManualSharding], transport: Transport
) -> Params:
    split = {path: x for path, x in shards.items() if shardings[path].splits}
    whole = dict(shards)
    for axes in dict.fromkeys(shardings[path].axes for path in split):
        group = {path: x for path, x in split.items() if shardings[path].axes == axes}
        n = lax.axis_size(axes)
        for paths in make_buckets(group, shardings, n):
            if is_gathered_flat(paths, group, shardings):
                whole |= _gather_bucket({p: group[p] for p in paths}, shardings, n)
                continue
            x = group[paths[0]]
            gathers = transport.for_gathers(n * x.nbytes)
            for dim, dim_axes in shardings[paths[0]].splits:
                for axis in reversed(dim_axes):
                    x = gathers.all_gather(x, (axis,), dim)
            whole[paths[0]] = x
    return whole


def _gather_bucket(
    shards: Params, shardings: Mapping[str, ManualSharding], n: int
) -> Params:
    """Gathers the tensors of one bucket by one collective over each axis."""
    first = shardings[next(iter(shards))]
    axes = first.axes
    rows = jnp.concatenate([x.reshape(-1) for x in shards.values()])[None]
    if extra := gather_padding(rows.shape[1], first.lanes):
        rows = jnp.pad(rows, ((0, 0), (0, extra)))
    for axis in reversed(axes):
        rows = lax.all_gather(rows, axis, tiled=True)
    start, whole = 0, {}
    for path, x in shards.items():
        ((dim, _),) = shardings[path].splits
        parts = rows[:, start : start + x.size].reshape(n, *x.shape)
        start += x.size
        shape = (*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :])
        whole[path] = jnp.moveaxis(parts, 0, dim).reshape(shape)
    return whole


def reduce_scatter_grads(
    grads: Mapping[str, Array | Product],
    shardings: Mapping[str, ManualSharding],
    transport: Transport = ONE_SHOT,
) -> Params:
    """Sums tensors over the axes that split them; every device keeps its shard.

    W[D, F] of every device -> W[D_fsdp, F] of the sum: the transpose of
    `gather_shards`. Communication: (n-1)/n of the whole bytes sent per device.

    Args:
      grads: {path: this device's addend}; call inside shard_map.
      shardings: {path: how manual axes split it}.
      transport: how the tensors move.

    Returns:
      {path: this device's shard of the sum}.
    """
    scatter = functools.partial(
        _reduce_scatter, shardings=shardings, transport=transport
    )
    return on_local_shards(scatter, grads, shardings)


def _reduce_scatter(
    grads: Mapping[str, Array | Product],
    shardings: Mapping[str, ManualSharding],
    transport: Transport,
) -> Params:
    split = {path: x for path, x in grads.items() if shardings[path].splits}
    shards = {path: whole(x) for path, x in grads.items() if path not in split}
    for axes in dict.fromkeys(shardings[path].axes for path in split):
        group = {path: x for path, x in split.items() if shardings[path].axes == axes}
        n = lax.axis_size(axes)
        for paths in make_buckets(group, shardings, 1):
            if len(paths) > 1:
                bucket = {path: whole(group[path]) for path in paths}
                shards |= _scatter_bucket(bucket, shardings, n, transport)
                continue
            x = group[paths[0]]
            for dim, dim_axes in reversed(shardings[paths[0]].splits):
                for axis in dim_axes:
                    if isinstance(x, Product):
                        x = _scatter_product(x, dim, axis, transport)
                    else:
                        x = _scatter_dim(x, dim, (axis,), transport)
            shards[paths[0]] = x
    return {path: shards[path] for path in grads}


def _scatter_product(x: Product, dim: int, axis: str, transport: Transport) -> Array:
    """Reduce-scatters one dim of a gradient that is still to be computed."""
    if not transport.covers((axis,)):
        return _scatter_dim(x.whole(), dim, (axis,), transport)
    columns = math.prod(x.shape[dim:]) // lax.axis_size(axis)
    if columns >= TILE[1]:
        return transport.reduce_scatter_of(functools.partial(x.part, dim), axis, dim)
    # As in `_scatter_dim`, whose reasons hold here as well.
    front = x.moved(dim)
    rows = transport.reduce_scatter_of(functools.partial(front.part, 0), axis)
    return jnp.moveaxis(rows, 0, dim)


def _scatter_dim(
    x: Array, dim: int, axes: tuple[str, ...], transport: Transport
) -> Array:
    """Reduce-scatters one dim of a tensor, most often reshaped to rows of a matrix."""
    n = lax.axis_size(axes)
    shard = (*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :])
    is_narrow = math.prod(shard[dim:]) < TILE[1]
    if transport.covers(axes) and dim and not (is_narrow and dim == x.ndim - 1):
        # Rings take slices as they are, and a large tensor need not be copied.
        return transport.reduce_scatter(x, axes, dim)
    if transport.covers(axes) and is_narrow:
        # Rows narrower than a tile would be padded on all devices; these are wider.
        front = jnp.moveaxis(x, dim, 0)
        rows = transport.reduce_scatter(front.reshape(len(front), -1), axes)
        return jnp.moveaxis(rows.reshape(-1, *front.shape[1:]), 0, dim)
    if not dim:
        rows = x.reshape(len(x), -1)
    else:
        # The compiler would undo a plain transpose, hence the split into n parts.
        rows = jnp.moveaxis(x.reshape(*x.shape[:dim], n, *shard[dim:]), dim, 0)
        whole_tiles = math.prod(shard) % TILE[0] == 0
        rows = rows.reshape(n * (TILE[0] if whole_tiles else 1), -1)
    return transport.reduce_scatter(rows, axes).reshape(shard)


def _scatter_bucket(
    whole: Params, shardings: Mapping[str, ManualSharding], n: int, transport: Transport
) -> Params:
    """Reduce-scatters the tensors of one bucket together over n devices."""
    rows, shapes = [], {}
    for path, x in whole.items():
        ((dim, _),) = shardings[path].splits
        shapes[path] = (*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :])
        x = x.reshape(*x.shape[:dim], n, *shapes[path][dim:])
        rows.append(jnp.moveaxis(x, dim, 0).reshape(n, -1))
    axes, start, shards = shardings[next(iter(whole))].axes, 0, {}
    flat = jnp.concatenate(rows, axis=1)
    if extra := padding(flat.shape[1]):
        flat = jnp.pad(flat, ((0, 0), (0, extra)))
    if flat.shape[1] % math.prod(TILE) == 0:
        flat = flat.reshape(n * TILE[0], -1)
    for axis in axes:
        flat = transport.reduce_scatter(flat, (axis,))
    flat = flat.reshape(-1)
    for path, shape in shapes.items():
        size = math.prod(shape)
        shards[path] = flat[start : start + size].reshape(shape)
        start += size
    return shards


def all_reduce_grads(
    tree: Params,
    shardings: Mapping[str, ManualSharding],
    why: str = REPLICATED,
) -> Params:
    """Sums gradients over the manual axes that do not split them, in buckets.

    Args:
      tree: {path: this device's shard of its addend}; call inside shard_map.
      shardings: {path: how manual axes split it}.
      why: the purpose, for reports.

    Returns:
      {path: this device's shard of the sum}.
    """
    with purpose(why, ""):
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
