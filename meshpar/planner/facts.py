"""Facts about a model, its optimizer and its batch that hold under every layout.

One layer is traced for each policy of rematerialization, for bytes, and again for each
way in which a layer exchanges tokens; layer, embedding and head are traced once, for
FLOPs. No layout traces the model again.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

from meshpar.arrays import Params, abstract, abstract_layer
from meshpar.errors import MeshparError
from meshpar.layouts.axes import AXES, EXPERT, is_held
from meshpar.layouts.layer_uses import splits_rows
from meshpar.layouts.layout import Layout
from meshpar.layouts.mixes import is_mix
from meshpar.layouts.plan import Plan
from meshpar.layouts.remat import (
    EXPERT_ROWS,
    NONE,
    REMAT_POLICIES,
    lacks_values,
    named_values,
)
from meshpar.layouts.resolve import make_plan
from meshpar.lowering.layer_residuals import Deferred
from meshpar.lowering.layer_trace import (
    TracedLayer,
    average_layer,
    trace_deferred,
    trace_policies,
    with_padding,
)
from meshpar.lowering.optimizer import Optimizer, optimizer_of
from meshpar.lowering.padding import lanes_of
from meshpar.mesh.mesh import make_mesh
from meshpar.mesh.platform import CPU
from meshpar.models.layer_stack import LayeredModel
from meshpar.models.model import Model
from meshpar.models.model_scope import on_one_device
from meshpar.ops.experts.config import MixtureConfig
from meshpar.planner.exchanges import Law, exchange_of, law_of, weighted
from meshpar.planner.flops import (
    Flops,
    cudnn_kernel,
    grouped_flops,
    in_float8,
    last_dim,
    looped_bytes,
    matmul_flops,
)
from meshpar.replicated import map_rows, num_rows, row_leaves

_ROWS = 2, 4
"""Rows of the batches that are traced: what grows with them, and what does not."""

_CLOSE = 0.01
"""Largest part of a layer's bytes in which fixed ones may differ between sources."""


class Facts:
    """Sizes and FLOPs of a model, its optimizer and its batch, under any layout."""

    def __init__(
        self,
        model: Model,
        optimizer: optax.GradientTransformation | optax.MultiSteps,
        batch: Any,
        compute_dtype: Any,
        devices: Sequence[jax.Device],
    ):
        """Reads the facts.

        Args:
          model: with layers.
          optimizer: as in `meshpar.lower`.
          batch: abstract batch [batch, ...].
          compute_dtype: as in `meshpar.lower`.
          devices: to plan for; kernels depend on their kind.

        Raises:
          MeshparError: the model has no layers.
        """
        if model.layered is None:
            raise MeshparError(
                "plan: the model has no layered form, from which memory and time are "
                "predicted; name its layers by layers= (docs/your_model.md)"
            )
        self.model, self.batch, self.compute_dtype = model, batch, compute_dtype
        self._transformation, self.devices = optimizer, devices
        self._optimizers: dict[int, Optimizer] = {}
        self._traces: dict[tuple[str, Layout], tuple[TracedLayer, TracedLayer]] = {}
        self._sizes_deferred: dict[tuple[str, Layout], tuple[Deferred, Deferred]] = {}
        self._layers: dict[tuple, TracedLayer] = {}

    @property
    def layered(self) -> LayeredModel:
        """The model in its layered form."""
        return self.model.layered

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the model."""
        return self.optimizer_of(self.model)

    def optimizer_of(self, model: Model) -> Optimizer:
        """The optimizer of the model, whose stack may have padding between stages."""
        stack = self.layered.split(model.params)[1]
        depth = next(iter(stack.values())).shape[0]
        if depth not in self._optimizers:
            self._optimizers[depth] = optimizer_of(model, self._transformation)
        return self._optimizers[depth]

    @functools.cached_property
    def rows(self) -> int:
        """Rows of the whole batch."""
        return num_rows(self.batch)

    @functools.cached_property
    def length(self) -> int:
        """Size of the batch's second dim, such as the length of sequences; or 1."""
        shapes = [leaf.shape for leaf in row_leaves(self.batch)]
        return max((shape[1] for shape in shapes if len(shape) > 1), default=1)

    @functools.cached_property
    def used(self) -> "UsedNames":
        """The names that the model uses."""
        return used_names(self.model, self.batch_of(_ROWS[0]), self.devices[0])

    def batch_of(self, rows: int) -> Any:
        """The abstract batch with another number of rows."""

        def resized(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)

        return map_rows(resized, self.batch)

    def _traced(self, remat: str, exchange: Layout) -> tuple[TracedLayer, TracedLayer]:
        """One layer on one device, with each number of rows in `_ROWS`."""
        key = remat, exchange
        if key not in self._traces:
            law = self.law_of(exchange)
            sources = [self._traced(remat, own) for own in law.sources] if law else []
            if law and _grow_alike(sources):
                self._traces[key] = _summed(law, sources)
            else:
                self._trace(remat, exchange)
        return self._traces[key]

    def _trace(self, remat: str, exchange: Layout) -> None:
        policies = self.traced_with(remat, exchange)
        few, many = (
            trace_policies(*self.of_trace(exchange, rows), policies) for rows in _ROWS
        )
        for policy in policies:
            self._traces[policy, exchange] = few[policy], many[policy]

    def _deferred(self, remat: str, exchange: Layout) -> tuple[Deferred, Deferred]:
        """Bytes handed over in a backward pass, for each number of rows in `_ROWS`."""
        if (remat, exchange) not in self._sizes_deferred:
            policies = self.traced_with(remat, exchange)
            few, many = (
                trace_deferred(*self.of_trace(exchange, rows), policies)
                for rows in _ROWS
            )
            for policy in policies:
                self._sizes_deferred[policy, exchange] = few[policy], many[policy]
        return self._sizes_deferred[remat, exchange]

    def traced_with(self, remat: str, exchange: Layout) -> tuple[str, ...]:
        """The policies that are traced with one: those that a search tries.

        Laws for `expert` read those of experts without it, too.
        """
        tried = self.used.policies(exchange.expert > 1 or self._has_experts)
        return tried if remat in tried else (remat,)

    @functools.cached_property
    def _has_experts(self) -> bool:
        every = (param.names or () for param in self.model.params.values())
        return any(is_held(EXPERT, dim) for dim in itertools.chain(*every))

    def law_of(self, exchange: Layout, moves: bool = False) -> Law | None:
        """The law by which an exchange follows; None if it is traced.

        Args:
          exchange: of `exchange_of`.
          moves: as in `exchanges.law_of`.
        """
        if exchange.context == exchange.expert == 1:
            return None
        return law_of(exchange, self.used.heads, self.used.mixtures, moves)

    def of_trace(
        self, exchange: Layout, rows: int
    ) -> tuple[LayeredModel, Plan, Mesh, Any]:
        """Arguments of a trace: layers, plan, mesh and batch, of rows for each device.

        Args:
          exchange: of `exchange_of`, whose devices alone are in the mesh.
          rows: of the batch on each device.
        """
        state = self.optimizer.abstract_state
        plan = make_plan(exchange, self.model.params, state, self.compute_dtype)
        sizes = tuple(exchange.sizes.values())
        devices = np.array(self.devices[: math.prod(sizes)]).reshape(sizes)
        mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))
        return self.layered, plan, mesh, self.batch_of(rows * exchange.expert)

    def layer(self, layout: Layout, rows: float, ways: int) -> TracedLayer:
        """Bytes of one layer on one device.

        Args:
          layout: its rematerialization, on average over the layers of a mix, what the
            layers use `tensor` for, and what exchanges tokens inside the layer.
          rows: rows of one microbatch on one device; a fraction of a row where the
            length is split.
          ways: devices along `tensor`, which split features or rows.
        """
        by_features = ways > 1 and not splits_rows(layout.layers)
        exchange, pipes = exchange_of(layout), layout.pipe > 1
        return self._layer_of(layout.remat, rows, ways, by_features, exchange, pipes)

    def _layer_of(self, *key: Any) -> TracedLayer:
        if key not in self._layers:
            self._layers[key] = self._layer(*key)
        return self._layers[key]

    def _layer(
        self,
        remat: str,
        rows: float,
        ways: int,
        by_features: bool,
        exchange: Layout,
        pipes: bool,
    ) -> TracedLayer:
        if is_mix(remat):

            def of_policy(policy: str) -> TracedLayer:
                return self._layer_of(policy, rows, ways, by_features, exchange, pipes)

            return average_layer(remat, self.layered.depth, of_policy)
        few, many = self._traced(remat, exchange)
        if pipes:
            sizes = self._deferred(remat, exchange)
            few, many = (
                layer.with_deferred(size)
                for layer, size in zip((few, many), sizes, strict=True)
            )
        scale = (rows * exchange.context - _ROWS[0]) / (_ROWS[1] - _ROWS[0])

        def grown(name: str) -> int:
            first, second = getattr(few, name), getattr(many, name)
            parts = 1 if name == "grouped_whole" else ways
            return max(0, round((first + scale * (second - first)) / parts))

        traced = TracedLayer(*(grown(name) for name in TracedLayer._fields))
        return with_padding(traced, by_features, self.devices[0])

    @functools.cached_property
    def flops(self) -> Flops:
        """FLOPs of one row, counted in traces of a layer, embedding and head."""
        layered = self.layered
        batch, layout = self.batch_of(_ROWS[0]), Layout()
        # Kernels are written out as matmuls there.
        cpu = jax.devices(CPU.name)[0]
        shared, stack = layered.split(abstract(self.model.params))

        def trace(device: jax.Device, fn: Callable, *args: Any) -> tuple[Any, float]:
            mesh = make_mesh(layout, [device])
            with on_one_device(layout, mesh) as scope:
                jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
            return jaxpr, (matmul_flops(jaxpr) + sum(scope.looped_flops)) / _ROWS[0]

        def count(*args: Any) -> float:
            return trace(cpu, *args)[1]

        key = jax.eval_shape(lambda: jax.random.key(0))
        mesh = make_mesh(layout, [cpu])
        with on_one_device(layout, mesh):
            x = jax.eval_shape(layered.embed, shared, batch, key)
            context = jax.eval_shape(layered.context, shared, batch, key)
        weights = abstract_layer(stack)
        args = layered.layer, weights, x, key, context
        # Some kernels take half the precision alone.
        narrow_args = map(self._in_compute_dtype, (weights, x))
        traced, layer = trace(self.devices[0], args[0], *narrow_args, key, context)
        lanes = lanes_of(make_mesh(layout, [self.devices[0]]))
        narrow = matmul_flops(traced, lambda eqn: last_dim(eqn) < lanes) / _ROWS[0]
        grouped = grouped_flops(traced) / _ROWS[0]

        def head(shared: Any, x: Any, batch: Any, key: Any) -> Any:
            def loss(trained: Any, x: Any) -> Any:
                return layered.head_loss(shared | trained, x, batch, key)[0]

            return jax.grad(loss, argnums=(0, 1))(_floats(shared), x)

        outside = 3 * count(layered.embed, shared, batch, key)
        head_args = map(self._in_compute_dtype, (shared, x))
        of_head, of_head_flops = trace(cpu, head, *head_args, batch, key)
        return Flops(
            layer=layer,
            grouped=grouped,
            narrow=narrow,
            float8=matmul_flops(traced, in_float8) / _ROWS[0],
            kernels=max(0.0, count(*args) - layer),
            outside=outside + of_head_flops,
            looped=looped_bytes(of_head),
            kernel=cudnn_kernel(traced),
        )

    def _in_compute_dtype(self, tree: Any) -> Any:
        """Shapes whose floats are in the dtype of the computation."""

        def cast(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            floating = jnp.issubdtype(x.dtype, jnp.floating)
            dtype = self.compute_dtype if floating and self.compute_dtype else x.dtype
            return jax.ShapeDtypeStruct(x.shape, dtype)

        return jax.tree.map(cast, tree)


def _summed(
    law: Law, sources: Sequence[tuple[TracedLayer, TracedLayer]]
) -> tuple[TracedLayer, TracedLayer]:
    """A layer with few and with many rows, from those of a law's sources."""

    def summed(*traced: TracedLayer) -> TracedLayer:
        fields = (weighted(law.bytes, own) for own in zip(*traced, strict=True))
        layer = TracedLayer(*(max(0, round(x)) for x in fields))
        return layer._replace(fused=layer.saved)  # As on several devices.

    few, many = (summed(*own) for own in zip(*sources, strict=True))
    return few, many


def _grow_alike(sources: Sequence[tuple[TracedLayer, TracedLayer]]) -> bool:
    """Whether what does not grow with rows is nearly the same in all sources of a law.

    Experts that no kernel reads in place do not: each device holds a copy of its own.
    """
    first, second = _ROWS
    for sizes in zip(*itertools.starmap(zip, sources), strict=True):
        fixed = [few - first * (many - few) / (second - first) for few, many in sizes]
        if max(fixed) - min(fixed) > _CLOSE * max(few for few, _ in sizes):
            return False
    return True


class UsedNames(NamedTuple):
    """The names that a model uses in its loss.

    Attributes:
      dims: of the dims of activations that it constrains.
      values: of the values that it names for rematerialization.
      vocabulary: whether embedding and loss use the functions of `ops.vocabulary`.
      heads: numbers of heads of keys that attention has.
      mixtures: of its experts.
    """

    dims: frozenset[str] = frozenset()
    values: frozenset[str] = frozenset()
    vocabulary: bool = False
    heads: frozenset[int] = frozenset()
    mixtures: frozenset[MixtureConfig] = frozenset()

    def policies(self, splits_experts: bool) -> tuple[str, ...]:
        """Policies of rematerialization whose values a layer names.

        Args:
          splits_experts: whether devices exchange rows of experts, which names them.
        """
        given = self.values | ({EXPERT_ROWS} if splits_experts else set())
        return NONE, *(x for x in REMAT_POLICIES if not lacks_values(x, given))


def used_names(model: Model, batch: Any, device: jax.Device) -> UsedNames:
    """The names that a model uses, from one trace of its loss.

    Args:
      model: the model.
      batch: abstract batch [batch, ...].
      device: to trace for; kernels depend on its kind.
    """
    layout, params = Layout(), abstract(model.params)
    mesh = make_mesh(layout, [device])
    key = jax.eval_shape(lambda: jax.random.key(0))
    with on_one_device(layout, mesh) as scope:
        jaxpr = jax.make_jaxpr(model.loss)(params, batch, key)
    dims = frozenset(name for name in scope.names_used if name)
    used = map(frozenset, (scope.heads_used, scope.experts_used))
    return UsedNames(dims, named_values(jaxpr), len(scope.vocabulary_used) > 1, *used)


def _floats(params: Params) -> Params:
    """The parameters that can have a gradient."""
    return {p: w for p, w in params.items() if jnp.issubdtype(w.dtype, jnp.floating)}
