"""Order: x after y, where y is no operand of x. Every dependency of that kind is here.

    after        later arrays wait for a few numbers of the first ones
    in_turn      each array waits for the numbers of its fellow, at the same places
    zero_after   the 0 that an array waits for, where the caller adds it
    computed     arrays that a compiler computes as they stand, before it uses them

The first three add a 0 that is computed from what comes first. Compilers drop barriers
before they schedule, and keep this 0: so it decides when a collective or a loop runs,
and what is in memory beside it. A collective must not follow a loop with collectives
that it does not read, on platforms that may mix them (`Platform.mixes_collectives`).

`computed` is a barrier, which adds no operation. It decides what is computed: nothing
is fused, shared, moved or computed again across it. It decides no order between loops
and collectives.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, Params, is_number
from meshpar.mesh.platform import traced_platform

T = TypeVar("T")


def after(
    first: Params, later: T, automatic: Mapping[str, PartitionSpec] | None = None
) -> T:
    """The numbers of a tree, which then cannot be computed before some tensors.

    Args:
      first: {name: tensor, whole or a shard}; call inside shard_map.
      later: any tree of arrays. No gradient passes from it to `first`.
      automatic: {name: how automatic axes split the tensor}; they split no tensor that
        has no entry.
    """
    zero = _zero_after_all(lax.stop_gradient(first), automatic or {})

    def wait(x: Array) -> Array:
        return x + zero.astype(x.dtype) if is_number(x) else x

    return jax.tree.map(wait, later)


def in_turn(first: Any, later: T) -> T:
    """Makes the arrays of a tree wait for another tree's, where platforms need it.

    No device reads what another one holds, so automatic axes may split the arrays.

    Args:
      first: a tree of arrays, split over automatic axes as those of `later`.
      later: a tree of arrays of the same shapes. No gradient passes to `first`.
    """

    def wait(first: Array, later: Array) -> Array:
        if not (is_number(first) and is_number(later)):
            return later
        zero = jnp.nan_to_num(jnp.minimum(jnp.abs(first), 0))
        return later + lax.stop_gradient(zero).astype(later.dtype)

    mixes = traced_platform().mixes_collectives
    return jax.tree.map(wait, first, later) if mixes else later


def zero_after(x: Array) -> Array:
    """A float32 0 that cannot be computed before x, or NaN if x begins with one.

    What it is added to comes after x.

    Args:
      x: not empty; not split over automatic axes.
    """
    return jnp.minimum(jnp.abs(x[(0,) * x.ndim].astype(jnp.float32)), 0)


def computed(tree: T) -> T:
    """Arrays that are all computed before any is used, and as they stand.

    Compilers do not fuse them with what uses them, nor share, move or compute again
    what makes them.
    """
    return lax.optimization_barrier(tree)


def _zero_after_all(
    tensors: Params, automatic: Mapping[str, PartitionSpec]
) -> float | Array:
    """A 0 that comes after all of these; every device reads what it holds."""

    def zero(tensors: Params) -> Array:
        numbers = filter(is_number, tensors.values())
        total = sum(map(zero_after, numbers), jnp.float32(0))
        return jnp.nan_to_num(total)

    specs = {name: automatic.get(name, PartitionSpec()) for name in tensors}
    if not any(map(any, specs.values())):
        return zero(tensors)
    mesh = jax.sharding.get_abstract_mesh()
    # All devices have the same 0: nothing has to be checked, nor to move.
    return jax.shard_map(
        zero,
        in_specs=(specs,),
        out_specs=PartitionSpec(),
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        check_vma=False,
    )(tensors)
