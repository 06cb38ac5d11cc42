"""The frame of a shard_map program: manual axes, specs, keys, weighted sums and means.

Every runner of the shard_map lowering works inside one frame. Its functions run inside
shard_map, unless they say otherwise.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from meshpar.arrays import Array, Params, abstract, num_bytes, vary
from meshpar.collectives.shard_keys import Inner, for_shard
from meshpar.collectives.transport import Transports, transports_for
from meshpar.contracts.purposes import purpose
from meshpar.errors import LayoutError
from meshpar.fsdp.buckets import TILE
from meshpar.fsdp.sharding import ManualSharding
from meshpar.fsdp.terms import Shapes
from meshpar.fsdp.zero import Zero
from meshpar.layouts.axes import (
    BATCH_DIMS,
    EXPERT,
    MANUAL_AXES,
    REPLICA,
    TENSOR,
    TOKEN_AXES,
    in_use,
    ways_of,
)
from meshpar.layouts.layer_uses import splits_rows
from meshpar.layouts.layout import Layout
from meshpar.layouts.plan import Plan, Spec, partition_spec
from meshpar.layouts.row_draws import Draws
from meshpar.layouts.scope import Scope
from meshpar.lowering.batches import batch_specs
from meshpar.lowering.layer_trace import whole_bytes
from meshpar.lowering.padding import lanes_of
from meshpar.lowering.state import cast_params
from meshpar.lowering.totals import Totals
from meshpar.mesh.platform import platform_of
from meshpar.metrics import LossResult
from meshpar.models.layer_stack import LayeredModel
from meshpar.models.model_scope import model_scope
from meshpar.replicated import map_rows, num_rows
from meshpar.rows import opaque


def _of_leaves(make: Callable) -> functools.cached_property:
    """A property that `Frame.of_leaves` keeps."""

    def shared(frame: "Frame") -> Any:
        return frame.of_leaves(make.__name__, lambda: make(frame))

    return functools.cached_property(functools.update_wrapper(shared, make))


@dataclasses.dataclass(frozen=True)
class Frame:
    """Axes, specs and functions that the parts of one shard_map program share.

    Attributes:
      layered: the model layer by layer.
      plan: spec of every leaf.
      mesh: the device mesh.
      stage_axes: manual axes beside those that split the batch.
      row_axes: axes that split the batch here, and features elsewhere (`row_layers`).
      draws: which random numbers of the loss belong to rows.
    """

    layered: LayeredModel
    plan: Plan
    mesh: Mesh
    stage_axes: tuple[str, ...] = ()
    row_axes: tuple[str, ...] = ()
    draws: Draws = Draws()

    def of_leaves(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Makes once what depends on leaves, mesh, manual axes and a key alone.

        Frames of plans that share their leaves (`Plan.of_layout`) share it.
        """
        key = key, self.mesh, self.stage_axes, self.row_axes
        return self.plan.of_leaves.of(key, make)

    @functools.cached_property
    def over_rows(self) -> "Frame":
        """The frame in which `tensor` splits the batch as `fsdp` does."""
        return dataclasses.replace(self, row_axes=(TENSOR,))

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.plan.layout

    @functools.cached_property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which this lowering splits the batch."""
        axes = (axis for axis in TOKEN_AXES if axis in MANUAL_AXES)
        return (*in_use(axes, self.mesh.shape), *self.row_axes)

    @functools.cached_property
    def manual_axes(self) -> tuple[str, ...]:
        """The axes of the shard_map; all others stay automatic."""
        return (*self.stage_axes, *self.batch_axes)

    @_of_leaves
    def held(self) -> dict[str, Spec]:
        """{path: manual axes along which each device computes with its part}, by dim.

        Nothing gathers the tensor along them, nor reduces its gradient.
        """
        manual = set(self.manual_axes) - set(self.row_axes)
        return {
            path: tuple(tuple(a for a in axes if a in manual) for axes in leaf.held)
            for path, leaf in self.plan.parameters.items()
        }

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axis along which replicas run apart, or ()."""
        return in_use((REPLICA,), self.mesh.shape)

    @property
    def all_manual_axes(self) -> tuple[str, ...]:
        """The manual axes, and the axis of replicas around them."""
        return (*self.replica_axes, *self.manual_axes)

    @_of_leaves
    def transports(self) -> Transports:
        """How weights and gradients move."""
        return transports_for(self.mesh, self.batch_axes)

    @_of_leaves
    def specs(self) -> dict[str, PartitionSpec]:
        """{path: spec} of parameters over the manual axes alone."""
        manual = set(self.manual_axes)
        return {
            path: partition_spec(
                tuple(tuple(a for a in axes if a in manual) for axes in leaf.spec)
            )
            for path, leaf in self.plan.parameters.items()
        }

    @_of_leaves
    def shardings(self) -> dict[str, ManualSharding]:
        """{path: how manual axes split it} of parameters and gradients.

        Without the axes along which it is held.
        """
        shardings, manual = {}, self.manual_axes
        lanes = TILE[1] if platform_of(self.mesh).tiles_vectors else 1
        for path, leaf in self.plan.parameters.items():
            dims = zip(leaf.spec, self.held[path], strict=True)
            spec = tuple(tuple(a for a in axes if a not in held) for axes, held in dims)
            own = {*itertools.chain(*self.held[path])}
            axes = tuple(axis for axis in manual if axis not in own)
            shardings[path] = ManualSharding.of(path, spec, axes, lanes)
        return shardings

    def zero(self) -> Zero:
        """The ZeRO policy of the layout; in ticks where there are stages."""
        return Zero(
            layered=self.layered,
            layout=self.layout,
            shardings=self.shardings,
            transports=self.transports,
            in_ticks=bool(self.stage_axes),
            beside_automatic=self.layout.tensor > 1 and not self.row_axes,
            cast=self.cast,
            vary=self.vary,
            trained=frozenset(self.plan.gradients),
            on_host=self.plan.paths_on_host,
            in_place=self.read_in_place,
        )

    @property
    def read_in_place(self) -> frozenset[str]:
        """Paths of matrices of experts, which kernels may read in stacks of layers."""
        if not platform_of(self.mesh).copies_rows:
            return frozenset()
        matrices = (p for p, x in self.plan.weights.items() if len(x.shape) == 4)
        return frozenset(
            p for p in matrices if EXPERT in (self.plan.weights[p].names or ())
        )

    @_of_leaves
    def expert_bytes(self) -> int:
        """Bytes of the experts of one layer, if their matmuls are kernels here."""
        if lanes_of(self.mesh) == 1:
            return 0
        stack = self.layered.split(self.plan.weights)[1].values()
        experts = (x for x in stack if EXPERT in (x.names or ()))
        rows = self.layered.depth // self.layout.pipe
        return sum(whole_bytes(x, self.layout.sizes) for x in experts) // rows

    def ways(self, axes: Iterable[str]) -> int:
        """Devices that axes span together."""
        return ways_of(axes, self.mesh.shape)

    def vary(self, x: Array) -> Array:
        """Marks an array as differing over the manual axes."""
        return vary(x, self.all_manual_axes)

    def cast(self, params: Params) -> Params:
        """Parameters in the dtype of the loss."""
        return cast_params(params, self.plan)

    @contextlib.contextmanager
    def scope(self) -> Iterator[Scope]:
        """The scope in which the layers of the model are traced.

        Raises:
          LayoutError: they do not use the experts that `expert` splits.
        """
        with model_scope(self.layout, self.mesh, self.all_manual_axes) as scope:
            yield scope
        if EXPERT in self.manual_axes and not scope.experts_used:
            raise LayoutError(
                f"{EXPERT}={self.layout.expert}: a layer of the model sees the experts "
                "of one device alone, and does not call meshpar.ops.experts.mixture, "
                "which moves tokens to the others; call it, or use lowering=jit"
            )

    def mapped(self, fn: Callable, batch: Any, out_specs: Any) -> Callable:
        """fn(params, key, batch) as a function of global arrays, run on shards.

        Call it outside shard_map.

        Args:
          fn: runs on one device's shards.
          batch: the global batch, arrays or ShapeDtypeStructs; only ranks matter.
          out_specs: specs of the results over the manual axes.
        """
        if not self.manual_axes:
            return fn
        return jax.shard_map(
            fn,
            in_specs=(
                self.specs,
                PartitionSpec(),
                batch_specs(self.layout, batch, self.batch_axes),
            ),
            out_specs=out_specs,
            axis_names=set(self.manual_axes),
        )

    def shard_key(self, key: Array, batch: Any) -> Array:
        """The key whose draws are this shard's part of the plain key's draws.

        Args:
          key: the plain key.
          batch: this shard's part of the batch.
        """
        rows, *inner = (
            tuple(axis for axis in axes if axis in self.batch_axes)
            for axes in BATCH_DIMS.values()
        )
        order = self.layout.token_order
        split = [Inner(lax.axis_index(a), self.ways(a), order) for a in inner if a]
        in_parts = self.layout.microbatches > 1 or splits_rows(self.layout.layers)
        if not rows and not split and not in_parts:
            return key
        first = lax.axis_index(rows) if rows else jnp.uint32(0)
        num = num_rows(batch)
        return for_shard(key, first, num, *split, draws=self.draws)

    def totals(self, result: LossResult, is_last: Any = True) -> Totals:
        """Loss and metrics of this device's samples, each times its weight.

        Args:
          result: of the loss of this device's samples.
          is_last: whether they are the last microbatch.
        """
        if self.batch_axes:
            shard, count = lax.axis_index(self.batch_axes), self.ways(self.batch_axes)
            is_last = is_last & (shard == count - 1)
        totals = Totals.of(result).last_where(is_last)
        # The vjp adds up over the stages that share the head: only one starts it.
        with purpose("vocab=pipe", "where the backward pass starts"):
            return jax.tree.map(self.vary, totals)

    def over_devices(self, totals: Totals) -> Totals:
        """Adds up the totals of all devices to the totals of the whole batch."""
        return totals.over(self.manual_axes)

    def stage_weights(self, dtype: Any = None) -> Shapes:
        """{path: whole weight of one device's layers and experts}, as it travels.

        Runs anywhere.

        Args:
          dtype: another dtype, such as that of sums.
        """
        wire, weights = self.transports.wire_dtype, self.plan.weights

        def make() -> Shapes:
            return {
                path: jax.ShapeDtypeStruct(shape, dtype or wire(weights[path].dtype))
                for path, shape in self._stage_shapes.items()
            }

        return self.of_leaves(("stage_weights", dtype), make)

    @_of_leaves
    def _stage_shapes(self) -> dict[str, tuple[int, ...]]:
        """{path: shape of the whole weight of one device's layers and experts}."""
        return {
            path: tuple(
                size // self.ways(held)
                for size, held in zip(leaf.shape, self.held[path], strict=True)
            )
            for path, leaf in self.plan.weights.items()
        }

    def stage_shards(self, dtype: Any = None) -> Shapes:
        """The shards that the manual axes make of `stage_weights(dtype)`."""

        def make() -> Shapes:
            shards = {}
            for path, x in self.stage_weights(dtype).items():
                shape = list(x.shape)
                for dim, axes in self.shardings[path].splits:
                    shape[dim] //= self.ways(axes)
                shards[path] = x.update(shape=tuple(shape))
            return shards

        return self.of_leaves(("stage_shards", dtype), make)

    def activations(self, batch: Any) -> list[jax.ShapeDtypeStruct]:
        """One device's microbatch between two layers, in the dtype that travels.

        Runs anywhere.

        Args:
          batch: abstract batch of one replica.
        """

        def shard(x: Any) -> jax.ShapeDtypeStruct:
            dims = zip(x.shape, self.layout.batch_spec(len(x.shape)), strict=True)
            rows, *rest = (size // self.ways(axes) for size, axes in dims)
            shape = (rows // self.layout.microbatches, *rest)
            return jax.ShapeDtypeStruct(shape, x.dtype)

        params, rows = abstract(self.plan.weights), map_rows(shard, batch)
        key = jax.eval_shape(lambda: jax.random.key(0))
        # As the check of rows traces the model, so that jax knows the trace.
        with jax.set_mesh(self.mesh), opaque.analysed():
            x = jax.eval_shape(self.layered.embed, params, rows, key)
        return [
            leaf.update(dtype=self.transports.wire_dtype(leaf.dtype))
            for leaf in jax.tree.leaves(x)
        ]

    def activation_bytes(self, batch: Any) -> int:
        """Bytes of `activations`."""
        return sum(map(num_bytes, self.activations(batch)))
