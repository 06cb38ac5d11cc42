"""Declares the collectives of ZeRO, from shapes alone.

`declare_moves` counts the buckets that `gather` moves, and asks the transport for the
collectives that a compiled program shows for them. The other functions apply the policy
of `zero`: which tensors move, and how often per step.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshpar.arrays import abstract_layer, num_bytes
from meshpar.collectives.transport import ONE_SHOT, Movement, Transport
from meshpar.contracts.declared import DeclaredCollective
from meshpar.fsdp.buckets import (
    gather_padding,
    is_gathered_flat,
    limits,
    make_buckets,
    padding,
)
from meshpar.fsdp.sharding import ManualSharding, entry_axes
from meshpar.fsdp.zero import SHARED, Zero
from meshpar.layouts.axes import ways_of

Shapes = Mapping[str, jax.ShapeDtypeStruct]
Shardings = Mapping[str, ManualSharding]
Sizes = Mapping[str, int]
"""{mesh axis: size}."""


WEIGHTS = "gradients of weights"
"""Name of the pass that computes them, where it is split off the backward pass."""


class LayerPass(NamedTuple):
    """One pass over the layers of a stack.

    Attributes:
      name: "forward", "backward", "forward again" or `WEIGHTS`.
      runs: number of runs per step.
      depth: layers of one run.
      scans: number of scans that run them, one after the other.
    """

    name: str
    runs: int
    depth: int
    scans: int = 1


def weight_reading(passes: Sequence[LayerPass]) -> list[LayerPass]:
    """The passes that need the layers' weights: all but that of their gradients."""
    return [one for one in passes if one.name != WEIGHTS]


def local_shape(
    x: jax.ShapeDtypeStruct, sharding: ManualSharding, sizes: Sizes
) -> jax.ShapeDtypeStruct:
    """Shape of a tensor on one device, split over the automatic axes only."""
    if not any(sharding.automatic):
        return x
    shape = list(x.shape)
    for dim, entry in enumerate(sharding.automatic):
        shape[dim] //= ways_of(entry_axes(entry), sizes)
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype)


def declare_moves(
    kind: str,
    shapes: Shapes,
    shardings: Shardings,
    sizes: Sizes,
    transport: Transport,
    runs: int,
    why: str,
    beside: str = "",
) -> Iterator[DeclaredCollective]:
    """Declares `gather_shards` or `reduce_scatter_grads` of whole tensors.

    Args:
      kind: "all_gather" or "reduce_scatter".
      shapes: {path: whole tensor, in the dtype in which it moves}.
      shardings: {path: how manual axes split it}.
      sizes: {mesh axis: size}.
      transport: how the tensors move.
      runs: number of moves per step.
      why: the reason, for reports.
      beside: the pass over the layers beside which they move.
    """
    if runs == 0:
        return
    split = tuple(
        (x.shape, x.dtype, sharding)
        for path, x in shapes.items()
        if (sharding := shardings[path]).splits
    )
    moves = _moves_once(kind, split, tuple(sizes.items()), transport, limits())
    for axes, ways, moved in moves:
        yield DeclaredCollective(
            moved.kind,
            axes,
            ways,
            runs * moved.count,
            runs * moved.payload_bytes,
            f"{why}, {moved.note}" if moved.note else why,
            gathers=kind == "all_gather",
            beside=beside,
        )


@functools.lru_cache(maxsize=4096)
def _moves_once(
    kind: str,
    tensors: tuple[tuple[tuple[int, ...], Any, ManualSharding], ...],
    sizes: tuple[tuple[str, int], ...],
    transport: Transport,
    bounds: tuple[int, int],
) -> list[tuple[tuple[str, ...], int, Movement]]:
    """(axes, their devices, all movement) of tensors that move once.

    Planners ask for the same tensors in thousands of layouts.

    Args:
      kind: as in `declare_moves`.
      tensors: (shape, dtype, sharding) of each one.
      sizes: (mesh axis, size) of each one.
      transport: as in `declare_moves`.
      bounds: those of `buckets.limits`, which decide what moves together.
    """
    del bounds  # A change of them is another question.
    mesh, split, shardings = dict(sizes), {}, {}
    for i, (shape, dtype, sharding) in enumerate(tensors):
        whole, shardings[str(i)] = jax.ShapeDtypeStruct(shape, dtype), sharding
        split[str(i)] = local_shape(whole, sharding, mesh)
    totals: dict[tuple, list[int]] = {}
    for axes in dict.fromkeys(sharding.axes for sharding in shardings.values()):
        group = {path: x for path, x in split.items() if shardings[path].axes == axes}
        for paths in make_buckets(group, shardings, 1):
            bucket_transport = transport
            if kind == "all_gather":
                # A bucket of several tensors is gathered by one collective.
                is_flat = is_gathered_flat(paths, group, shardings)
                alone = 0 if is_flat else num_bytes(group[paths[0]])
                bucket_transport = transport.for_gathers(alone)
            for dim_axes, size in _bucket_moves(kind, paths, group, shardings, mesh):
                ways = ways_of(dim_axes, mesh)
                moved = bucket_transport.declare(kind, dim_axes, ways, size)
                total = totals.setdefault((dim_axes, moved.kind, moved.note), [0, 0])
                total[0] += moved.count
                total[1] += moved.payload_bytes
    return [
        (axes, ways_of(axes, mesh), Movement(moved_kind, *total, note))
        for (axes, moved_kind, note), total in totals.items()
    ]


def _bucket_moves(
    kind: str, paths: list[str], shapes: Shapes, shardings: Shardings, sizes: Sizes
) -> Iterator[tuple[tuple[str, ...], int]]:
    """((axis,), whole bytes) of each move of one bucket."""
    first = shardings[paths[0]]
    size = sum(math.prod(shapes[path].shape) for path in paths)
    if len(paths) > 1 and kind == "reduce_scatter":
        ways = ways_of(first.axes, sizes)
        size += ways * padding(size // ways)
    if kind == "all_gather" and is_gathered_flat(paths, shapes, shardings):
        ways = ways_of(first.axes, sizes)
        size += ways * gather_padding(size // ways, first.lanes)
    size *= jnp.dtype(shapes[paths[0]].dtype).itemsize
    for axis in (axis for _, axes in reversed(first.splits) for axis in axes):
        yield (axis,), size
        size //= sizes[axis]


def declare_all_reduces(
    shards: Shapes, shardings: Shardings, sizes: Sizes, why: str
) -> Iterator[DeclaredCollective]:
    """Declares `all_reduce_grads` of shards over the axes that do not split them.

    Args:
      shards: {path: shard over the manual axes, in the dtype in which it moves}.
      shardings: {path: how manual axes split it}.
      sizes: {mesh axis: size}.
      why: the reason, for reports.
    """
    for axes in dict.fromkeys(shardings[path].rest for path in shards):
        if not axes:
            continue
        group = {
            path: local_shape(x, shardings[path], sizes)
            for path, x in shards.items()
            if shardings[path].rest == axes
        }
        count = sum(1 for _ in make_buckets(group, shardings, 1))
        size = sum(map(num_bytes, group.values()))
        yield DeclaredCollective(
            "all_reduce", axes, ways_of(axes, sizes), count, size, why
        )


def declared_gathers(
    zero: Zero, weights: Shapes, sizes: Sizes, passes: list[LayerPass]
) -> Iterator[DeclaredCollective]:
    """Declares the gathers of one step.

    Args:
      zero: the policy.
      weights: {path: whole weight of one stage, in the dtype in which it moves}.
      sizes: {mesh axis: size}.
      passes: all passes over the layers.
    """
    declare = functools.partial(declare_moves, "all_gather", sizes=sizes)
    why, outside = f"zero={zero.layout.zero_level}: weights", {"transport": ONE_SHOT}
    if not zero.gathers_layers:
        why = f"{why} gathered once a step"
        yield from declare(weights, zero.shardings, runs=1, why=why, **outside)
        return
    shared, stack = zero.layered.split(weights)
    runs = zero.layout.microbatches if zero.reduces_shared_early else 1
    shared_why = f"{why}: {SHARED}"
    yield from declare(shared, zero.shardings, runs=runs, why=shared_why, **outside)
    layer, transports = abstract_layer(stack), zero.transports
    ahead = {path: layer.pop(path) for path in list(layer) if path in zero.prefetched}
    for name, runs, depth, scans in weight_reading(passes):
        for shapes, transport, layers, when in (
            (layer, transports.weights, depth, "layer by layer"),
            # The last layer of a scan gathers the first one's weights again.
            (ahead, transports.prefetched, depth + scans, "one layer ahead"),
        ):
            yield from declare(
                shapes,
                zero.layer_shardings,
                transport=transport,
                runs=runs * layers,
                why=f"{why}: {when}, {name}",
                beside=name,
            )


def declared_scatters(
    zero: Zero, weights: Shapes, sums: Shapes, sizes: Sizes, passes: list[LayerPass]
) -> Iterator[DeclaredCollective]:
    """Declares the reduce_scatters of one step.

    Args:
      zero: the policy.
      weights: {path: whole weight of one stage, in the dtype in which it moves}.
      sums: {path: whole weight of one stage, in the dtype of summed gradients}.
      sizes: {mesh axis: size}.
      passes: all passes over the layers; the last one computes gradients of weights.
    """
    declare = functools.partial(declare_moves, "reduce_scatter", sizes=sizes)
    why, transports = f"zero={zero.layout.zero_level}: gradients", zero.transports
    early = zero.reduces_shared_early
    yield from declare(
        zero.layered.split(weights if early else sums)[0],
        zero.shardings,
        transport=transports.once,
        runs=zero.layout.microbatches if early else 1,
        why=f"{why}: {SHARED}",
    )
    early = zero.reduces_early
    stack = zero.layered.split(weights if early else sums)[1]
    if not stack:
        return
    backward = passes[-1]
    depth = next(iter(stack.values())).shape[0]
    yield from declare(
        abstract_layer(stack),
        zero.layer_shardings,
        transport=transports.gradients if early else transports.once,
        runs=backward.runs * backward.depth if early else depth,
        why=f"{why}: layer by layer, {'going backward' if early else 'once a step'}",
        beside=backward.name if early else "",
    )
