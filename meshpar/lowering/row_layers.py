"""Layers whose devices along `tensor` have rows of their own, as along `fsdp`.

Their segment of the stack is one shard_map more, over `tensor`. Inside, a `LayerScan`
gathers the layers' weights over `fsdp` and `tensor` alike. On the way in, activations
whose length `tensor` splits change to split rows by one all_to_all, and back on the way
out. Their gradients go the other way.

Source: Miao et al., Galvatron, arXiv:2211.13878, section 3.2 (layers with strategies of
  their own, and what moves between two of them).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, Params
from meshpar.collectives.shard_keys import for_part
from meshpar.contracts.purposes import purpose
from meshpar.fsdp.gather import all_reduce_grads
from meshpar.fsdp.layer_scan import LayerScan
from meshpar.fsdp.rows import Rows
from meshpar.fsdp.saved import Residuals
from meshpar.fsdp.sharding import ManualSharding
from meshpar.fsdp.zero import Zero
from meshpar.layouts.axes import TENSOR
from meshpar.layouts.remat import NONE
from meshpar.lowering.frame import Frame
from meshpar.models.row_dims import NO_ROWS, RowDims

OVER_ROWS = "gradients of layers, over the rows of tensor"
OVER_TENSOR = ManualSharding((), (TENSOR,), PartitionSpec())
"""How a tensor that `tensor` does not split is summed over it."""


def length_dim(frame: Frame, shape: tuple[int, ...], dim: int) -> int | None:
    """The dim that `tensor` splits between layers that split features.

    It is the one after the rows, if the layout splits the residual stream's length, and
    if it divides.

    Args:
      frame: the shard_map program.
      shape: of an activation [rows, length, ...] of one device along the batch.
      dim: the one that holds rows.
    """
    splits = TENSOR in frame.layout.activation_rules["residual_length"]
    after = dim + 1
    if not splits or len(shape) <= after + 1 or shape[after] % frame.layout.tensor:
        return None
    return after


@dataclasses.dataclass(frozen=True)
class RowLayers:
    """A segment of the stack; has the functions of a `LayerScan`.

    Attributes:
      frame: of the shard_map around it.
      zero: the policy inside, of `frame.over_rows`.
      remat: the policy of the segment's layers.
      key: random key of this shard of the batch.
      context: what all layers read.
      dims: where activations and context hold rows.
      enters: whether activations come from layers that split features, or from the
        embedding.
      exits: whether they go to such layers, or to the head.
    """

    frame: Frame
    zero: Zero
    remat: str
    key: Array
    context: Any
    dims: RowDims
    enters: bool
    exits: bool

    @property
    def repeats(self) -> bool:
        """Whether the backward pass computes values again (`LayerScan`)."""
        return self.remat != NONE

    def is_written_out(self, depth: int) -> bool:
        """Never: these layers always run in a loop."""
        del depth
        return False

    def run(self, leaves: Params, constants: Params, x: Any, rows: Rows) -> Any:
        def inside(layers: LayerScan, leaves: Params, constants: Params, x: Any) -> Any:
            x = self._moved_in(x) if self.enters else x
            y = layers.run(leaves, constants, x, _numbered(rows))
            return self._moved_out(y) if self.exits else y

        before, after = self._specs(x, self.enters), self._specs(x, self.exits)
        return self._mapped(inside, leaves, constants, (before,), after)(x)

    def forward(
        self, leaves: Params, constants: Params, x: Any, rows: Rows
    ) -> tuple[Any, Residuals]:

        def inside(
            layers: LayerScan, leaves: Params, constants: Params, x: Any
        ) -> tuple[Any, Residuals]:
            x = self._moved_in(x) if self.enters else x
            y, saved = layers.forward(leaves, constants, x, _numbered(rows))
            return self._moved_out(y) if self.exits else y, saved

        before, after = self._specs(x, self.enters), self._specs(x, self.exits)
        out = after, self._residual_specs
        return self._mapped(inside, leaves, constants, (before,), out)(x)

    def backward(
        self,
        leaves: Params,
        constants: Params,
        residuals: Residuals,
        dx: Any,
        rows: Rows,
        sums: Params | None = None,
    ) -> tuple[Any, Params]:

        def inside(
            layers: LayerScan,
            leaves: Params,
            constants: Params,
            residuals: Residuals,
            dx: Any,
            sums: Params | None,
        ) -> tuple[Any, Params]:
            dx = self._moved_in(dx) if self.exits else dx
            own = None if sums is None else sums | self._zeros(leaves)
            args = leaves, constants, residuals, dx, _numbered(rows)
            dx, grads = layers.backward(*args, own)
            dx = self._moved_out(dx) if self.enters else dx
            return dx, grads | self._summed(grads, sums, rows)

        grads = self._weight_specs(leaves)
        before, after = self._specs(dx, self.exits), self._specs(dx, self.enters)
        given = self._residual_specs, before, None if sums is None else grads
        run = self._mapped(inside, leaves, constants, given, (after, grads))
        return run(residuals, dx, sums)

    def _mapped(
        self,
        fn: Callable,
        leaves: Params,
        constants: Params,
        in_specs: tuple,
        out_specs: Any,
    ) -> Callable:
        """fn(scan of the layers, leaves, constants, ...) over `tensor`, of the rest."""
        frame, impl = self.frame.over_rows, jax.random.key_impl(self.key)

        def inside(
            key: Array, context: Any, leaves: Params, constants: Params, *args: Any
        ) -> Any:
            key = jax.random.wrap_key_data(key, impl=impl)
            key = for_part(key, lax.axis_index(TENSOR), frame.ways((TENSOR,)))
            # Marked here, so that no layer sums a gradient over all devices.
            weights = jax.tree.map(frame.vary, (leaves, constants))
            with frame.scope():
                layers = self.zero.layers(key, context, self.remat)
                return fn(layers, *weights, *args)

        context = jax.tree.map(_split, self.context, self.dims.context)
        weights = self._weight_specs(leaves), self._weight_specs(constants)
        mapped = jax.shard_map(
            inside,
            in_specs=(PartitionSpec(), context, *weights, *in_specs),
            out_specs=out_specs,
            axis_names={TENSOR},
        )
        key = jax.random.key_data(self.key)
        return lambda *args: mapped(key, self.context, leaves, constants, *args)

    # How arrays are split over `tensor`.

    def _weight_specs(self, stack: Params) -> dict[str, PartitionSpec]:
        return {path: self.frame.shardings[path].automatic for path in stack}

    @property
    def _residual_specs(self) -> Residuals:
        kept = self.frame.layered.kept(self.dims.x)
        return Residuals(PartitionSpec(TENSOR), tuple(map(_spec, kept)))

    def _specs(self, x: Any, at_ends: bool) -> Any:
        """Specs of activations, at the ends of segments or inside them."""

        def spec(leaf: Array, dim: int) -> PartitionSpec:
            length = length_dim(self.frame, leaf.shape, dim) if at_ends else None
            return _spec(dim if length is None else length)

        return jax.tree.map(spec, x, self.dims.x)

    # Inside shard_map.

    def _moved_in(self, x: Any) -> Any:
        """Activations with split rows, from those whose length is split."""
        return self._moved(x, into_rows=True)

    def _moved_out(self, x: Any) -> Any:
        """The inverse of `_moved_in`."""
        return self._moved(x, into_rows=False)

    def _moved(self, x: Any, into_rows: bool) -> Any:
        def leaf(x: Array, dim: int) -> Array:
            ways, shape = self.frame.layout.tensor, list(x.shape)
            shape[dim + 1] *= ways if into_rows and x.ndim > dim + 1 else 1
            length = length_dim(self.frame, tuple(shape), dim)
            if length is None:
                return x
            dims = (dim, length) if into_rows else (length, dim)
            wire = x.astype(self.zero.transports.wire_dtype(x.dtype))
            with purpose("activations, between split rows and split length"):
                y = lax.all_to_all(wire, TENSOR, *dims, tiled=True)
            return y.astype(x.dtype)

        return jax.tree.map(leaf, x, self.dims.x)

    def _is_whole(self, path: str) -> bool:
        """Whether `tensor` does not split a tensor of the stack."""
        return TENSOR in self.zero.layer_shardings[path].rest

    def _zeros(self, leaves: Params) -> Params:
        """Zeros for gradients of tensors that `tensor` does not split."""
        zeros = {p: jnp.zeros_like(x) for p, x in leaves.items() if self._is_whole(p)}
        return {path: self.frame.over_rows.vary(x) for path, x in zeros.items()}

    def _summed(self, grads: Params, sums: Params | None, rows: Rows) -> Params:
        """Gradients of tensors that `tensor` does not split, summed over it.

        Args:
          grads: of all leaves; of the whole stack if there are sums.
          sums: to whose rows they are added; None returns them alone.
          rows: the rows.
        """
        own = {path: x for path, x in grads.items() if self._is_whole(path)}
        start, count = rows.start, len(rows.numbers)
        if sums is not None:
            own = {p: lax.slice_in_dim(x, start, start + count) for p, x in own.items()}
        dtypes = {path: x.dtype for path, x in own.items()}
        if self.zero.transports.widens:
            own = {path: x.astype(jnp.float32) for path, x in own.items()}
        shardings = dict.fromkeys(own, OVER_TENSOR)
        own = all_reduce_grads(own, shardings, OVER_ROWS)
        # Compilers for TPUs would move the sums out of the loop over microbatches.
        own = jax.tree.map(lax.optimization_barrier, own)
        own = {path: x.astype(dtypes[path]) for path, x in own.items()}
        if sums is None:
            return own
        for path, x in own.items():
            before = lax.slice_in_dim(sums[path], start, start + count)
            total = before + x.astype(before.dtype)
            own[path] = lax.dynamic_update_slice_in_dim(sums[path], total, start, 0)
        return own


def _numbered(rows: Rows) -> Rows:
    """Rows, numbered inside shard_map."""
    return Rows(rows.start, rows.start + jnp.arange(len(rows.numbers)))


def _split(_: Any, dim: int) -> PartitionSpec:
    return _spec(dim)


def _spec(dim: int) -> PartitionSpec:
    """The spec of an array one of whose dims `tensor` splits."""
    return PartitionSpec() if dim == NO_ROWS else PartitionSpec(*[None] * dim, TENSOR)
