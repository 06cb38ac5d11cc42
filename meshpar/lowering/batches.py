"""Batches: how a global batch is split over devices, and how hosts place their part.

A batch leaf is [batch, length, ...]; `Layout.batch_spec` says which mesh axes split
which dim. Every device holds the leaves without rows.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Collection, Mapping, Sequence
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
from meshpar.multihost import agree
from meshpar.replicated import check_marks, map_rows, row_leaves


def batch_specs(layout: Layout, batch: Any, axes: Collection[str]) -> Any:
    """The spec of every leaf of a batch over some of the mesh axes."""

    def leaf_spec(x: Any) -> PartitionSpec:
        dims = layout.batch_spec(len(x.shape))
        return partition_spec(tuple(tuple(a for a in d if a in axes) for d in dims))

    return map_rows(leaf_spec, batch, others=lambda _: PartitionSpec())


def abstract_batches(batch: Any, layout: Layout, mesh: Mesh) -> tuple[Any, Any]:
    """The abstract global batch and one replica's batch, with shardings.

    Args:
      batch: pytree of arrays or ShapeDtypeStructs [batch, ...], the global shapes.
      layout: says how they are split.
      mesh: the device mesh.

    Raises:
      MeshparError: a batch without rows, or leaves without a common first dim.
      LayoutError: a dim that does not divide over its axes, or leaves of several
        lengths where an axis splits them.
    """
    leaves = row_leaves(batch)
    if not leaves:
        raise MeshparError("the batch is empty: give at least one array [batch, ...]")
    if any(x.shape[0] != leaves[0].shape[0] for x in leaves):
        shapes = [tuple(x.shape) for x in leaves]
        raise MeshparError(
            f"batch leaves {shapes}: all need the same leading batch dim; give arrays "
            "[batch, ...], and meshpar.Replicated(array) for one without rows, such as "
            "class weights"
        )
    layout.check_batch_size(leaves[0].shape[0])
    _check_lengths(leaves, layout)

    def leaf(x: Any, lead: tuple[str, ...], parts: int) -> jax.ShapeDtypeStruct:
        shape = (x.shape[0] // parts, *x.shape[1:])
        rows, *rest = layout.batch_spec(len(shape))
        _check_divides(x.shape, rest, layout)
        sharding = NamedSharding(mesh, partition_spec(((*lead, *rows), *rest)))
        return _abstract(shape, x.dtype, sharding)

    def whole(x: Any) -> jax.ShapeDtypeStruct:
        return _abstract(x.shape, x.dtype, NamedSharding(mesh, PartitionSpec()))

    lead = (REPLICA,) if layout.replica > 1 else ()
    return (
        map_rows(lambda x: leaf(x, lead, 1), batch, others=whole),
        map_rows(lambda x: leaf(x, (), layout.replica), batch, others=whole),
    )


def _abstract(
    shape: tuple[int, ...], dtype: Any, sharding: NamedSharding
) -> jax.ShapeDtypeStruct:
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


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
      compared: not empty once processes have compared their leaves without rows.
    """

    abstract: Any
    order: str = CONTIGUOUS
    context: int = 1
    compared: list[bool] = dataclasses.field(default_factory=list, repr=False)

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """Rows of the global batch that this process's devices hold, ascending."""
        first = row_leaves(self.abstract)[0]
        index_map = first.sharding.addressable_devices_indices_map(first.shape)
        rows = {
            row
            for index in index_map.values()
            for row in range(*index[0].indices(first.shape[0]))
        }
        return np.array(sorted(rows))

    def with_rows(self, num_rows: int) -> "BatchPlacer":
        """Places batches of another number of rows.

        They are split over those axes over which they divide; the devices along the
        others hold the same rows.
        """

        def leaf(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            mesh, (rows, *rest) = x.sharding.mesh, x.sharding.spec
            axes = dividing_axes(rows or (), num_rows, mesh.shape)
            sharding = NamedSharding(mesh, PartitionSpec(axes, *rest))
            return x.update(shape=(num_rows, *x.shape[1:]), sharding=sharding)

        return dataclasses.replace(self, abstract=map_rows(leaf, self.abstract))

    def as_arrays(self, batch: Any) -> Any:
        """A host batch, whose leaves may be lists or numbers, as numpy arrays.

        Raises:
          MeshparError: its leaves are not those of the program.
        """
        check_marks(self.abstract, batch)

        def array(target: Any, x: Any) -> np.ndarray:
            del target
            return np.asarray(x)

        return map_rows(array, self.abstract, batch, others=array)

    def place(self, batch: Any) -> Any:
        """The global batch as device arrays, whose tokens are in `order`.

        All processes give the same leaves without rows, which the first call compares.

        Args:
          batch: pytree of host arrays [len(rows), ...], tokens in their own order.

        Raises:
          MeshparError: a leaf of another shape or dtype than the program was lowered
            for, or with integers that the program's dtype cannot hold. 64-bit leaves
            become what jax makes of them, 32-bit unless `jax_enable_x64` is set.
          MultihostError: processes have other values in a leaf without rows.
        """
        batch = self.as_arrays(batch)
        self._compare(batch)
        return map_rows(self._place, self.abstract, batch, others=self._place_whole)

    def _compare(self, batch: Any) -> None:
        """Compares leaves without rows with those of other processes, once."""
        if jax.process_count() == 1 or self.compared:
            return
        self.compared.append(True)
        nodes = map_rows(lambda _: None, batch)
        if leaves := jax.tree_util.tree_leaves_with_path(nodes):
            keystr = jax.tree_util.keystr
            agree.check_fingerprint(
                {f"batch{keystr(keys)}": _digest(x) for keys, x in leaves}
            )

    def _place(self, target: jax.ShapeDtypeStruct, x: np.ndarray) -> jax.Array:
        x = _checked(x, (len(self.rows), *target.shape[1:]), target.dtype)
        if self.order != CONTIGUOUS and x.ndim > 1:
            x = x[:, device_order(self.order, x.shape[1], self.context)]

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            wanted = np.arange(*index[0].indices(target.shape[0]))
            return x[(np.searchsorted(self.rows, wanted), *index[1:])]

        return jax.make_array_from_callback(target.shape, target.sharding, shard)

    def _place_whole(self, target: jax.ShapeDtypeStruct, x: np.ndarray) -> jax.Array:
        x = _checked(x, target.shape, target.dtype)
        return jax.make_array_from_callback(target.shape, target.sharding, lambda _: x)


def dividing_axes(
    axes: str | Sequence[str], num_rows: int, sizes: Mapping[str, int]
) -> tuple[str, ...]:
    """The axes over which rows divide, outer to inner."""
    kept: list[str] = []
    for axis in (axes,) if isinstance(axes, str) else axes:
        if num_rows % ways_of((*kept, axis), sizes) == 0:
            kept.append(axis)
    return tuple(kept)


def _checked(x: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """A leaf of a batch in the dtype with which the program computes.

    Raises:
      MeshparError: it has another shape or dtype.
    """
    if x.shape != shape or jax.dtypes.canonicalize_dtype(x.dtype) != dtype:
        raise MeshparError(
            f"batch leaf {x.dtype}{list(x.shape)}: the program was lowered for "
            f"{dtype}{list(shape)} on this process"
        )
    return _as_dtype(x, dtype)


def _digest(x: np.ndarray) -> str:
    """Dtype, shape and a hash of an array; the value of a scalar."""
    value = x if x.ndim == 0 else hashlib.sha256(x.tobytes()).hexdigest()[:16]
    return f"{x.dtype}{list(x.shape)} {value}"


def natural_batch(batch: Any, order: str, context: int) -> Any:
    """A placed batch with tokens in their own order.

    Args:
      batch: pytree of arrays [batch, length, ...] or [batch].
      order: as in `BatchPlacer`.
      context: as in `BatchPlacer`.
    """

    def leaf(x: Array) -> Array:
        return x if x.ndim < 2 else in_natural_order(x, order, context, 1)

    return map_rows(leaf, batch)


def other_batch(batch: Any, num_parts: int, layout: Layout, mesh: Mesh) -> BatchPlacer:
    """Places a batch of another structure or size than batches of training.

    Args:
      batch: pytree of host arrays, this process's rows.
      num_parts: parts of the global batch, of which this process has one.
      layout: says how the batch is split; microbatches and replicas do not split it.
      mesh: the device mesh.

    Raises:
      LayoutError: a dim that does not divide over its axes.
    """
    batch = map_rows(np.asarray, batch, others=np.asarray)

    def leaf(x: np.ndarray) -> jax.ShapeDtypeStruct:
        shape = (num_parts * x.shape[0], *x.shape[1:])
        axes = layout.batch_spec(len(shape))
        rows = in_use(axes[0], layout.sizes)
        if shape[0] % (ways := ways_of(rows, layout.sizes)):
            raise LayoutError(
                f"a batch of {shape[0]} rows does not divide over {'*'.join(rows)}="
                f"{ways}; add rows, or use a smaller layout"
            )
        _check_divides(shape, list(axes[1:]), layout)
        return _abstract(shape, x.dtype, NamedSharding(mesh, partition_spec(axes)))

    def whole(x: np.ndarray) -> jax.ShapeDtypeStruct:
        return _abstract(x.shape, x.dtype, NamedSharding(mesh, PartitionSpec()))

    return BatchPlacer(map_rows(leaf, batch, others=whole))


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
