"""Communication patterns as named functions: push, pull, all_reduce, broadcast, ...

Thin functions over jax.lax, to be called inside shard_map with `axis` manual. "x[i]" is
the value on device i of the axis. The collective of each function is given in brackets;
`meshpar/contracts/cost.py` has its costs by that name.

Source: Chan et al., Collective Communication: Theory, Practice, and Experience,
  Concurrency and Computation 19(13), 2007; Li et al., Scaling Distributed Machine
  Learning with the Parameter Server, OSDI 2014, section 3 (push and pull).
"""

import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.errors import MeshparError
from meshpar.mesh import order

AxisName = str | tuple[str, ...]
"""One mesh axis, or several, outer to inner."""


def all_reduce(x: Array, axis: AxisName) -> Array:
    """Sums all x[i] for every device [all_reduce]."""
    return lax.psum(x, axis)


def all_gather(x: Array, axis: AxisName, dim: int = 0) -> Array:
    """Joins x[0], x[1], ... along `dim` for every device [all_gather]."""
    return lax.all_gather(x, axis, axis=dim, tiled=True)


def reduce_scatter(x: Array, axis: AxisName, dim: int = 0) -> Array:
    """Gives device i part i, along `dim`, of the sum of all x [reduce_scatter].

    Raises:
      MeshparError: the dim does not divide over the axis.
    """
    check_divides("reduce_scatter", x, axis, dim)
    return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def all_to_all(x: Array, axis: AxisName, split: int, join: int) -> Array:
    """Gives device i part i of every x [all_to_all].

    Args:
      x: this device's value.
      axis: mesh axes.
      split: dim that is cut into parts.
      join: dim along which the parts from all devices are joined.

    Raises:
      MeshparError: the dim does not divide over the axis.
    """
    check_divides("all_to_all", x, axis, split)
    return lax.all_to_all(x, axis, split_axis=split, concat_axis=join, tiled=True)


def pull(shard: Array, axis: AxisName, dim: int = 0) -> Array:
    """Parameter-server pull: joins all shards for every worker [all_gather]."""
    return all_gather(shard, axis, dim)


def push(update: Array, axis: AxisName, dim: int = 0) -> Array:
    """Parameter-server push: sums all workers' updates of a shard [reduce_scatter]."""
    return reduce_scatter(update, axis, dim)


def only_from(x: Array, axis: AxisName, root: int) -> Array:
    """Keeps x on device `root`, with zeros on the others.

    Raises:
      MeshparError: the axis has no such device.
    """
    _check_device("root", root, axis)
    return jnp.where(lax.axis_index(axis) == root, x, jnp.zeros_like(x))


def broadcast(x: Array, axis: AxisName, root: int = 0) -> Array:
    """Copies x[root] to every device [all_reduce, to which the others add zeros]."""
    return lax.psum(only_from(x, axis, root), axis)


def reduce(x: Array, axis: AxisName, root: int = 0) -> Array:
    """Sums all x[i] on device `root`, with zeros on the others [all_reduce]."""
    return only_from(lax.psum(x, axis), axis, root)


def scatter(x: Array, axis: AxisName, root: int = 0, dim: int = 0) -> Array:
    """Gives device i part i of x[root], along `dim` [reduce_scatter]."""
    return reduce_scatter(only_from(x, axis, root), axis, dim)


def gather(x: Array, axis: AxisName, root: int = 0, dim: int = 0) -> Array:
    """Joins all x[i] along `dim` on device `root`, zeros on the others [all_gather]."""
    return only_from(all_gather(x, axis, dim), axis, root)


def send(x: Array, axis: AxisName, source: int, target: int) -> Array:
    """Copies x[source] to device `target`, with zeros on the others [permute].

    Raises:
      MeshparError: the axis has no such device.
    """
    for name, device in (("source", source), ("target", target)):
        _check_device(name, device, axis)
    return lax.ppermute(x, axis, [(source, target)])


def wait(first: Array, later: Array) -> Array:
    """Returns `later` once `first` has arrived here [none].

    A collective of the result thus follows the collective that made `first`. The others
    run in any order. No gradient passes to `first`.
    """
    return order.after({"first": first}, later)


def barrier(x: Array, axis: AxisName) -> Array:
    """Returns x once every device has computed its x [all_reduce of 4 bytes].

    The result depends on the number of devices whose first element is NaN. It is never
    negative, which the compiler cannot know, so x is returned after the sum.
    """
    nans = jnp.isnan(x.ravel()[:1].astype(jnp.float32)).sum(dtype=jnp.int32)
    return jnp.where(lax.psum(nans, axis) >= 0, x, jnp.zeros_like(x))


def _check_device(name: str, device: int, axis: AxisName) -> None:
    """Raises MeshparError unless an axis has a device of this number."""
    n = lax.axis_size(axis)
    if not 0 <= device < n:
        raise MeshparError(
            f"{name}={device}: axis {axis!r} has {n} devices; use 0 to {n - 1}"
        )


def check_divides(name: str, x: Array, axis: AxisName, dim: int) -> None:
    """Raises MeshparError unless a dim of x divides over an axis."""
    if x.shape[dim] % (n := lax.axis_size(axis)):
        raise MeshparError(
            f"{name} of x{list(x.shape)} along dim {dim}: {x.shape[dim]} does not "
            f"divide over axis {axis!r} of size {n}; use a multiple of {n}"
        )
