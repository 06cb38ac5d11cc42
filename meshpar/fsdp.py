"""Fully sharded data parallelism (ZeRO-1, 2, 3) inside shard_map: gather and scatter.

A tensor of the training state is split over the manual axes of the mesh as its
`Placement` says. `gather` makes it whole before use; its transpose is the
reduce-scatter of the gradient, so ZeRO-3 is `gather` inside the layer. Small tensors
travel together in buckets of constant size.

Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, sections 5 and 6.2 (buckets);
  Zhao et al., PyTorch FSDP, arXiv:2304.11277.
"""

import dataclasses
import functools
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar import collectives
from meshpar.errors import LayoutError
from meshpar.plan import Spec, partition_spec

Array = jax.Array
Params = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Rings:
    """What is passed around rings, step by step; over other axes at once.

    Attributes:
      shapes: {axis: the torus that it is}.
      loop: whether the steps of a reduce_scatter are a loop, which is soon compiled,
        for what no compute could hide.
    """

    shapes: Mapping[str, tuple[int, ...]]
    loop: bool = False

    def has(self, axes: tuple[str, ...]) -> bool:
        """Whether what is split over these axes goes around rings."""
        return len(axes) == 1 and axes[0] in self.shapes


NO_RINGS = Rings(types.MappingProxyType({}))

BUCKET_BYTES = 4 * 2**20
"""Whole size of one bucket; tensors of a quarter of it or more travel alone."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the manual axes split one tensor, and what the automatic ones do.

    Attributes:
      splits: (dim, axes) of every dim that manual axes split.
      rest: the manual axes over which the tensor is whole.
      automatic: spec over the automatic axes alone.
    """

    splits: tuple[tuple[int, tuple[str, ...]], ...]
    rest: tuple[str, ...]
    automatic: PartitionSpec

    @classmethod
    def of(cls, path: str, spec: Spec, manual_axes: tuple[str, ...]) -> "Placement":
        """The placement of a leaf with mesh axes `spec` per dim.

        Raises:
          LayoutError: a dim splits over an automatic axis first.
        """
        splits, automatic = [], []
        for dim, axes in enumerate(spec):
            manual = tuple(axis for axis in axes if axis in manual_axes)
            if manual != axes[: len(manual)]:
                raise LayoutError(
                    f"{path}: dim {dim} splits over {'*'.join(axes)}; write data and "
                    "fsdp before tensor in its rule"
                )
            if manual:
                splits.append((dim, manual))
            automatic.append(axes[len(manual) :])
        split = {axis for _, axes in splits for axis in axes}
        rest = tuple(axis for axis in manual_axes if axis not in split)
        return cls(tuple(splits), rest, partition_spec(tuple(automatic)))

    @property
    def axes(self) -> tuple[str, ...]:
        """All manual axes that split the tensor."""
        return tuple(axis for _, axes in self.splits for axis in axes)

    @property
    def spec(self) -> PartitionSpec:
        """The manual part as a spec for shard_map."""
        dims = dict(self.splits)
        return PartitionSpec(*(dims.get(d) for d in range(max(dims, default=-1) + 1)))

    @property
    def automatic_axes(self) -> frozenset[str]:
        """The automatic axes that split the tensor."""
        dims = (dim if isinstance(dim, tuple) else (dim,) for dim in self.automatic)
        return frozenset(axis for dim in dims for axis in dim if axis is not None)

    @property
    def alone(self) -> bool:
        """Whether it cannot share a bucket: more than one dim is split."""
        return len(self.splits) > 1

    def layer(self) -> "Placement":
        """The placement of one layer of a stack."""
        splits = tuple((dim - 1, axes) for dim, axes in self.splits)
        return Placement(splits, self.rest, PartitionSpec(*self.automatic[1:]))


def vary(x: Array, axes: tuple[str, ...]) -> Array:
    """Marks an array as differing over manual axes: no hidden psum in a vjp."""
    missing = frozenset(axes) - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def locally(
    move: Callable[[Params], Params], tree: Params, placements: Mapping[str, Placement]
) -> Params:
    """Moves tensors with the automatic axes manual too, each device its own shard.

    A collective between automatic axes would be run on tensors made whole over them,
    and TPUs would turn a reduce_scatter into an all_reduce, even for axes of size 1.
    """
    kinds = jax.sharding.get_abstract_mesh()
    axes = set(kinds.axis_names) - set(kinds.manual_axes)
    specs = {path: placements[path].automatic for path in tree}
    if not axes or not tree:
        return move(tree)
    return jax.shard_map(move, in_specs=(specs,), out_specs=specs, axis_names=axes)(
        tree
    )


def buckets(
    tree: Mapping[str, Any], placements: Mapping[str, Placement], ways: int
) -> Iterator[list[str]]:
    """Groups the paths that travel together, in order.

    Args:
      tree: {path: array or shape}; only shapes and dtypes matter.
      placements: of the same paths.
      ways: how many times larger the moved tensors are than those of `tree`.
    """
    filling: dict[Any, tuple[list[str], int]] = {}
    for path, x in tree.items():
        size = math.prod(x.shape) * jnp.dtype(x.dtype).itemsize * ways
        if placements[path].alone or is_large(size):
            yield [path]
            continue
        automatic = placements[path].automatic_axes
        kind = placements[path].axes, automatic, jnp.dtype(x.dtype)
        paths, filled = filling.get(kind, ([], 0))
        if filled + size > BUCKET_BYTES:
            yield paths
            paths, filled = [], 0
        filling[kind] = [*paths, path], filled + size
    yield from (paths for paths, _ in filling.values())


def is_large(whole_bytes: int) -> bool:
    """Whether a tensor travels alone for its size."""
    return 4 * whole_bytes >= BUCKET_BYTES


def gather(
    shards: Params, placements: Mapping[str, Placement], rings: Rings = NO_RINGS
) -> Params:
    """Makes tensors whole; its transpose is `reduce_scatter`.

    W[D_fsdp, F] -> W[D, F] for every path. Communication: (n-1)/n of the whole bytes
    received per device.

    Args:
      shards: {path: this device's shard}; call inside shard_map.
      placements: of the same paths.
      rings: for large tensors.

    Returns:
      {path: whole tensor}, equal on all devices of the axes that split it.
    """
    move = functools.partial(_gather, placements=placements, rings=rings)
    return locally(move, shards, placements)


def _gather(
    shards: Params, placements: Mapping[str, Placement], rings: Rings
) -> Params:
    split = {path: x for path, x in shards.items() if placements[path].splits}
    whole = dict(shards)
    for axes in dict.fromkeys(placements[path].axes for path in split):
        group = {path: x for path, x in split.items() if placements[path].axes == axes}
        n = lax.axis_size(axes)
        for paths in buckets(group, placements, n):
            if len(paths) > 1:
                whole |= _gather_bucket({p: group[p] for p in paths}, placements, n)
                continue
            x = group[paths[0]]
            around = rings if is_large(n * x.nbytes) else NO_RINGS
            for dim, dim_axes in placements[paths[0]].splits:
                x = _gather_dim(x, dim, dim_axes, around)
            whole[paths[0]] = x
    return whole


def _gather_dim(x: Array, dim: int, axes: tuple[str, ...], rings: Rings) -> Array:
    if rings.has(axes):
        return collectives.torus_all_gather(x, axes[0], rings.shapes[axes[0]], dim)
    return lax.all_gather(x, axes, axis=dim, tiled=True)


def _gather_bucket(
    shards: Params, placements: Mapping[str, Placement], n: int
) -> Params:
    axes = placements[next(iter(shards))].axes
    flat = jnp.concatenate([x.reshape(-1) for x in shards.values()])
    rows, start, whole = lax.all_gather(flat, axes), 0, {}
    for path, x in shards.items():
        ((dim, _),) = placements[path].splits
        part = rows[:, start : start + x.size].reshape(n, *x.shape)
        start += x.size
        shape = (*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :])
        whole[path] = jnp.moveaxis(part, 0, dim).reshape(shape)
    return whole


def reduce_scatter(
    whole: Params, placements: Mapping[str, Placement], rings: Rings = NO_RINGS
) -> Params:
    """Sums tensors over the axes that split them; every device keeps its shard.

    W[D, F] of every device -> W[D_fsdp, F] of the sum: the transpose of `gather`.
    Communication: (n-1)/n of the whole bytes sent per device.

    Args:
      whole: {path: this device's addend}; call inside shard_map.
      placements: of the same paths.
      rings: for all of them.
    """
    scatter = functools.partial(_reduce_scatter, placements=placements, rings=rings)
    return locally(scatter, whole, placements)


def _scatter_rows(rows: Array, axes: tuple[str, ...], rings: Rings) -> Array:
    if rings.has(axes):
        shape = rings.shapes[axes[0]]
        return collectives.torus_reduce_scatter(rows, axes[0], shape, loop=rings.loop)
    return lax.psum_scatter(rows, axes, tiled=True)


def _reduce_scatter(
    whole: Params, placements: Mapping[str, Placement], rings: Rings
) -> Params:
    split = {path: x for path, x in whole.items() if placements[path].splits}
    shards = dict(whole)
    for axes in dict.fromkeys(placements[path].axes for path in split):
        group = {path: x for path, x in split.items() if placements[path].axes == axes}
        n = lax.axis_size(axes)
        for paths in buckets(group, placements, 1):
            if len(paths) > 1:
                shards |= _scatter_bucket(
                    {p: group[p] for p in paths}, placements, n, rings
                )
                continue
            x = group[paths[0]]
            for dim, dim_axes in placements[paths[0]].splits:
                x = _scatter_dim(x, dim, dim_axes, rings)
            shards[paths[0]] = x
    return shards


_TILE = 16, 128
"""Rows and columns of a TPU tile of the smallest dtype.

TPUs scatter along rows in whole tiles; what does not suit them they reduce whole, at
twice the traffic.
"""


def _scatter_dim(x: Array, dim: int, axes: tuple[str, ...], rings: Rings) -> Array:
    """Reduce-scatters along one dim, as rows of a matrix."""
    n = lax.axis_size(axes)
    shard = (*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :])
    if rings.has(axes) and math.prod(shard[dim:]) < _TILE[1]:
        # Columns fewer than a tile's would be padded, those of all devices at once.
        front = jnp.moveaxis(x, dim, 0)
        part = _scatter_rows(front.reshape(len(front), -1), axes, rings)
        return jnp.moveaxis(part.reshape(-1, *front.shape[1:]), 0, dim)
    if not dim:
        rows = x.reshape(len(x), -1)
    else:
        # No mere transpose, which the compiler would undo.
        rows = jnp.moveaxis(x.reshape(*x.shape[:dim], n, *shard[dim:]), dim, 0)
        whole_tiles = math.prod(shard) % _TILE[0] == 0
        rows = rows.reshape(n * (_TILE[0] if whole_tiles else 1), -1)
    return _scatter_rows(rows, axes, rings).reshape(shard)


def padding(shard_size: int) -> int:
    """Elements that a bucket adds to every device's part to scatter whole tiles."""
    tile = math.prod(_TILE)
    return -shard_size % tile if shard_size >= 16 * tile else 0


def _scatter_bucket(
    whole: Params, placements: Mapping[str, Placement], n: int, rings: Rings
) -> Params:
    rows, shapes = [], {}
    for path, x in whole.items():
        ((dim, _),) = placements[path].splits
        shapes[path] = (*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :])
        x = x.reshape(*x.shape[:dim], n, *shapes[path][dim:])
        rows.append(jnp.moveaxis(x, dim, 0).reshape(n, -1))
    axes, start, shards = placements[next(iter(whole))].axes, 0, {}
    flat = jnp.concatenate(rows, axis=1)
    if added := padding(flat.shape[1]):
        flat = jnp.pad(flat, ((0, 0), (0, added)))
    if flat.shape[1] % math.prod(_TILE) == 0:
        flat = flat.reshape(n * _TILE[0], -1)
    flat = _scatter_rows(flat, axes, rings).reshape(-1)
    for path, shape in shapes.items():
        size = math.prod(shape)
        shards[path] = flat[start : start + size].reshape(shape)
        start += size
    return shards


def all_reduce(tree: Params, placements: Mapping[str, Placement]) -> Params:
    """Sums tensors over the manual axes that do not split them, small ones together."""
    return locally(
        functools.partial(_all_reduce, placements=placements), tree, placements
    )


def _all_reduce(tree: Params, placements: Mapping[str, Placement]) -> Params:
    summed = {}
    for axes in dict.fromkeys(placements[path].rest for path in tree):
        group = {path: x for path, x in tree.items() if placements[path].rest == axes}
        if not axes:
            summed |= group
            continue
        for paths in buckets(group, placements, 1):
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
