"""Communication patterns as named functions: push, pull, all_reduce, broadcast, ...

Thin functions over jax.lax, to be called inside shard_map with `axis` manual. "x[i]" is
the value on device i of the axis, n its size. What each costs stands in `cost.py`: the
kind of collective in brackets is the key there.

Source: Chan et al., Collective Communication: Theory, Practice, and Experience,
  Concurrency and Computation 19(13), 2007; Li et al., Scaling Distributed Machine
  Learning with the Parameter Server, OSDI 2014, section 3 (push and pull).
"""

import jax
import jax.numpy as jnp
from jax import lax

Axis = str | tuple[str, ...]


def all_reduce(x: jax.Array, axis: Axis) -> jax.Array:
    """Every device gets the sum of all x[i] [all_reduce]."""
    return lax.psum(x, axis)


def all_gather(x: jax.Array, axis: Axis, dim: int = 0) -> jax.Array:
    """Every device gets x[0], x[1], ... joined along `dim` [all_gather]."""
    return lax.all_gather(x, axis, axis=dim, tiled=True)


def reduce_scatter(x: jax.Array, axis: Axis, dim: int = 0) -> jax.Array:
    """Device i gets part i, along `dim`, of the sum of all x [reduce_scatter].

    Raises:
      ValueError: the dim does not divide over the axis.
    """
    check_divides("reduce_scatter", x, axis, dim)
    return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def all_to_all(x: jax.Array, axis: Axis, split: int, join: int) -> jax.Array:
    """Device i gets part i, along `split`, of every x, joined along `join`.

    [all_to_all]

    Raises:
      ValueError: the dim does not divide over the axis.
    """
    check_divides("all_to_all", x, axis, split)
    return lax.all_to_all(x, axis, split_axis=split, concat_axis=join, tiled=True)


def pull(shard: jax.Array, axis: Axis, dim: int = 0) -> jax.Array:
    """Parameter-server pull: every worker gets all shards, joined [all_gather]."""
    return all_gather(shard, axis, dim)


def push(update: jax.Array, axis: Axis, dim: int = 0) -> jax.Array:
    """Parameter-server push: shard i gets the sum of all workers' updates to it.

    [reduce_scatter]
    """
    return reduce_scatter(update, axis, dim)


def only_from(x: jax.Array, axis: Axis, root: int) -> jax.Array:
    """X on device `root`, zeros on the others."""
    if not 0 <= root < lax.axis_size(axis):
        raise ValueError(
            f"root={root}: axis {axis!r} has {lax.axis_size(axis)} devices"
        )
    return jnp.where(lax.axis_index(axis) == root, x, jnp.zeros_like(x))


def broadcast(x: jax.Array, axis: Axis, root: int = 0) -> jax.Array:
    """Every device gets x[root] [all_reduce: others add zeros]."""
    return lax.psum(only_from(x, axis, root), axis)


def reduce(x: jax.Array, axis: Axis, root: int = 0) -> jax.Array:
    """Device `root` gets the sum of all x[i], the others get zeros [all_reduce]."""
    return only_from(lax.psum(x, axis), axis, root)


def scatter(x: jax.Array, axis: Axis, root: int = 0, dim: int = 0) -> jax.Array:
    """Device i gets part i of x[root], along `dim` [reduce_scatter]."""
    return reduce_scatter(only_from(x, axis, root), axis, dim)


def gather(x: jax.Array, axis: Axis, root: int = 0, dim: int = 0) -> jax.Array:
    """Device `root` gets all x[i] joined along `dim`, the others zeros [all_gather]."""
    return only_from(all_gather(x, axis, dim), axis, root)


def barrier(x: jax.Array, axis: Axis) -> jax.Array:
    """Returns x once all devices have theirs [all_reduce of 4 bytes].

    The wait is a dependency on data that no compiler can see through: how many devices
    hold a first element that is not a number.
    """
    odd = jnp.isnan(x.ravel()[:1].astype(jnp.float32)).sum(dtype=jnp.int32)
    return jnp.where(lax.psum(odd, axis) >= 0, x, jnp.zeros_like(x))


def check_divides(what: str, x: jax.Array, axis: Axis, dim: int) -> None:
    """Raises ValueError unless a dim of x divides over an axis."""
    if x.shape[dim] % (n := lax.axis_size(axis)):
        raise ValueError(
            f"{what} of x{list(x.shape)} along dim {dim}: {x.shape[dim]} does not "
            f"divide over axis {axis!r} of size {n}"
        )
