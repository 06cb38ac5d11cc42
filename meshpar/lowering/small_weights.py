"""Small weights that the jit lowering gathers together, one collective for a bucket.

The compiler gathers every weight by a collective of its own, and often twice.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, Params, num_bytes
from meshpar.collectives.transport import LARGE_BYTES
from meshpar.fsdp.buckets import BUCKET_BYTES
from meshpar.layouts.plan import LeafPlan, Spec, partition_spec


def gather_small(
    tree: Params,
    before: Mapping[str, LeafPlan],
    after: Mapping[str, Spec],
    ways: Callable[[tuple[str, ...]], int],
    constrain: Callable[[Array, PartitionSpec], Array],
) -> Params:
    """Makes small weights whole; call under jit, outside shard_map.

    Args:
      tree: {path: weight}.
      before: {path: how it is laid out}.
      after: {path: the spec that it shall have}; only weights that become whole count.
      ways: number of parts into which axes split a dim.
      constrain: constrains an array to a spec.

    Returns:
      The tree; weights of buckets are whole, others are as they were.
    """
    whole = dict(tree)
    for axes, dims in _buckets(tree, before, after):
        bucket = {path: jnp.moveaxis(tree[path], dim, 0) for path, dim in dims.items()}
        gather = _gather_bucket(partition_spec((axes,)), ways(axes), constrain)
        for path, x in gather(bucket).items():
            whole[path] = jnp.moveaxis(x, 0, dims[path])
    return whole


def _gather_bucket(
    split: PartitionSpec, ways: int, constrain: Callable[[Array, PartitionSpec], Array]
) -> Callable[[Params], Params]:
    """Makes a function that gathers tensors whose first dim is split in ways."""

    def through(tree: Params, *specs: PartitionSpec) -> Params:
        """Tensors that are constrained together: a row of numbers for each shard."""
        rows = jnp.concatenate([x.reshape(ways, -1) for x in tree.values()], 1)
        for spec in specs:
            rows = constrain(rows, spec)
        ends = itertools.accumulate(x.size // ways for x in tree.values())
        parts = jnp.split(rows, list(ends)[:-1], 1)
        return {
            path: part.reshape(x.shape)
            for (path, x), part in zip(tree.items(), parts, strict=True)
        }

    @jax.custom_vjp
    def gather(tree: Params) -> Params:
        return through(tree, split, PartitionSpec())

    # The derivative of every slice would be as large as the bucket.
    gather.defvjp(
        lambda tree: (gather(tree), None), lambda _, grads: (through(grads, split),)
    )
    return gather


def _buckets(
    tree: Params, before: Mapping[str, LeafPlan], after: Mapping[str, Spec]
) -> Iterator[tuple[tuple[str, ...], dict[str, int]]]:
    """(axes, {path: the dim that they split}) of every bucket of several weights."""
    buckets: dict[tuple, list[tuple[dict[str, int], int]]] = {}
    for path, x in tree.items():
        splits = [(dim, axes) for dim, axes in enumerate(before[path].spec) if axes]
        size = num_bytes(x)
        if len(splits) != 1 or any(after[path]) or size >= LARGE_BYTES:
            continue
        ((dim, axes),) = splits
        filling = buckets.setdefault((axes, x.dtype), [({}, 0)])
        paths, filled = filling[-1]
        if filled + size > BUCKET_BYTES:
            filling.append(({path: dim}, size))
        else:
            filling[-1] = {**paths, path: dim}, filled + size
    for (axes, _), filled in buckets.items():
        yield from ((axes, dims) for dims, _ in filled if len(dims) > 1)
