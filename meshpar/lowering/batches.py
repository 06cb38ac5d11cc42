"""Batches: how a global batch is split over devices, and how hosts place their part.

A batch leaf is [batch, length, ...]; `Layout.batch_spec` says which mesh axes split
which dim.
"""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.arrays import Array
from meshpar.errors import LayoutError, MeshparError
from meshpar.layouts.axes import BATCH_DIMS, REPLICA, in_use, ways_of
from meshpar.layouts.layout import Layout
from meshpar.layouts.plan import partition_spec
from meshpar.layouts.token_order import CONTIGUOUS, device_order, in_natural_order


def batch_specs(layout: Layout, batch: Any, axes: Collection[str]) -> Any:
    """The spec of every leaf of a batch over some of the mesh axes."""

    def leaf_spec(x: Any) -> PartitionSpec:
        dims = layout.batch_spec(len(x.shape))
        return partition_spec(tuple(tuple(a for a in d if a in axes) for d in dims))

    return jax.tree.map(leaf_spec, batch)


def abstract_batches(batch: Any, layout: Layout, mesh: Mesh) -> tuple[Any, Any]:
    """The abstract global batch, and that of one replica, with shardings.

    Args:
      batch: pytree of arrays or ShapeDtypeStructs [batch, ...], the global shapes.
      layout: says how they are split.
      mesh: the device mesh.

    Raises:
      MeshparError: an empty batch, or leaves without a common first dim.
      LayoutError: a dim that does not divide over its axes, or leaves of several
        lengths where an axis splits them.
    """
    leaves = jax.tree.leaves(batch)
    if not leaves:
        raise MeshparError("the batch is empty: give at least one array [batch, ...]")
    if any(not x.shape or x.shape[0] != leaves[0].shape[0] for x in leaves):
        shapes = [tuple(x.shape) for x in leaves]
        raise MeshparError(
            f"batch leaves {shapes}: all need the same leading batch dim; give arrays "
            "[batch, ...]"
        )
    layout.check_batch_size(leaves[0].shape[0])
    _check_lengths(leaves, layout)

    def leaf(x: Any, lead: tuple[str, ...], parts: int) -> jax.ShapeDtypeStruct:
        shape = (x.shape[0] // parts, *x.shape[1:])
        rows, *rest = layout.batch_spec(len(shape))
        _check_divides(x.shape, rest, layout)
        sharding = NamedSharding(mesh, partition_spec(((*lead, *rows), *rest)))
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    lead = (REPLICA,) if layout.replica > 1 else ()
    return (
        jax.tree.map(lambda x: leaf(x, lead, 1), batch),
        jax.tree.map(lambda x: leaf(x, (), layout.replica), batch),
    )


def _check_divides(
    shape: tuple[int, ...], axes_per_dim: list[tuple[str, ...]], layout: Layout
) -> None:
    """Checks the dims after the first, which `check_batch_size` has checked."""
    for dim, axes in enumerate(axes_per_dim, start=1):
        ways = ways_of(axes, layout.sizes)
        if shape[dim] % ways:
            raise LayoutError(
                f"batch leaf {list(shape)}: dim {dim} does not divide over "
                f"{'*'.join(axes)}={ways}; use a multiple of {ways}"
            )


def _check_lengths(leaves: list[Any], layout: Layout) -> None:
    """Raises LayoutError if an axis splits the length, and leaves have several."""
    axes = in_use(BATCH_DIMS["length"], layout.sizes)
    lengths = sorted({x.shape[1] for x in leaves if len(x.shape) > 1})
    if axes and len(lengths) != 1:
        shapes = [tuple(x.shape) for x in leaves]
        raise LayoutError(
            f"{'*'.join(axes)}={ways_of(axes, layout.sizes)} splits the length of "
            f"sequences, but the batch leaves {shapes} have the lengths {lengths}; "
            "give arrays [batch, length, ...] of one length, and [batch]"
        )


@dataclasses.dataclass(frozen=True)
class BatchPlacer:
    """Puts this process's rows of a batch onto its devices.

    Attributes:
      abstract: the global batch as ShapeDtypeStructs with shardings.
      order: in which the devices along `context` get the tokens of a sequence.
      context: size of that axis.
    """

    abstract: Any
    order: str = CONTIGUOUS
    context: int = 1

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """Rows of the global batch that this process's devices hold, ascending."""
        first = jax.tree.leaves(self.abstract)[0]
        index_map = first.sharding.addressable_devices_indices_map(first.shape)
        rows = {
            row
            for index in index_map.values()
            for row in range(*index[0].indices(first.shape[0]))
        }
        return np.array(sorted(rows))

    def place(self, batch: Any) -> Any:
        """The global batch as device arrays, whose tokens are in `order`.

        Args:
          batch: pytree of host arrays [len(rows), ...], tokens in their own order.

        Raises:
          MeshparError: a leaf of another shape or dtype than the program was lowered
            for, or with integers that the program's dtype cannot hold. 64-bit leaves
            become what jax makes of them, 32-bit unless `jax_enable_x64` is set.
        """
        return jax.tree.map(self._place, self.abstract, batch)

    def _place(self, target: jax.ShapeDtypeStruct, x: Any) -> jax.Array:
        x, shape = np.asarray(x), (len(self.rows), *target.shape[1:])
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        if x.shape != shape or dtype != target.dtype:
            raise MeshparError(
                f"batch leaf {x.dtype}{list(x.shape)}: the program was lowered for "
                f"{target.dtype}{list(shape)} on this process"
            )
        x = _as_dtype(x, target.dtype)
        if self.order != CONTIGUOUS and x.ndim > 1:
            x = x[:, device_order(self.order, x.shape[1], self.context)]

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            wanted = np.arange(*index[0].indices(target.shape[0]))
            return x[(np.searchsorted(self.rows, wanted), *index[1:])]

        return jax.make_array_from_callback(target.shape, target.sharding, shard)


def natural_batch(batch: Any, order: str, context: int) -> Any:
    """A placed batch with tokens in their own order.

    Args:
      batch: pytree of arrays [batch, length, ...] or [batch].
      order: as in `BatchPlacer`.
      context: as in `BatchPlacer`.
    """

    def leaf(x: Array) -> Array:
        return x if x.ndim < 2 else in_natural_order(x, order, context, 1)

    return jax.tree.map(leaf, batch)


def other_batch(batch: Any, num_parts: int, layout: Layout, mesh: Mesh) -> BatchPlacer:
    """Places a batch of another structure or size than that of training.

    Args:
      batch: pytree of host arrays, this process's rows.
      num_parts: parts of the global batch, of which this process has one.
      layout: says how the batch is split; microbatches and replicas do not split it.
      mesh: the device mesh.

    Raises:
      LayoutError: a dim that does not divide over its axes.
    """

    def leaf(x: Any) -> jax.ShapeDtypeStruct:
        x = np.asarray(x)
        shape = (num_parts * x.shape[0], *x.shape[1:])
        axes = layout.batch_spec(len(shape))
        rows = in_use(axes[0], layout.sizes)
        if shape[0] % (ways := ways_of(rows, layout.sizes)):
            raise LayoutError(
                f"a batch of {shape[0]} rows does not divide over {'*'.join(rows)}="
                f"{ways}; add rows, or use a smaller layout"
            )
        _check_divides(shape, list(axes[1:]), layout)
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        sharding = NamedSharding(mesh, partition_spec(axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return BatchPlacer(jax.tree.map(leaf, batch))


def _as_dtype(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in the dtype that jax computes with; integers must not wrap around."""
    if x.dtype == dtype:
        return x
    if np.issubdtype(dtype, np.integer) and x.size:
        low, high, limits = x.min(), x.max(), np.iinfo(dtype)
        if low < limits.min or high > limits.max:
            raise MeshparError(
                f"batch leaf {x.dtype}{list(x.shape)} holds {low} to {high}, and "
                f"{np.dtype(dtype)} holds {limits.min} to {limits.max}: map the values "
                "to a smaller range, or set jax_enable_x64"
            )
    return x.astype(dtype)
