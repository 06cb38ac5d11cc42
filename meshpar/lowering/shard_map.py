"""The explicit lowering: one shard_map, manual over data and fsdp, for layered model.

Every reduction over the batch axes is written here or in `fsdp`, so that their number
and bytes are known before compiling; `tensor` stays automatic inside. ZeRO says when
weights are whole and when gradients are reduced:

    zero=1   weights gathered once a step; gradients reduce-scattered after it
    zero=2   the same gather; gradients reduce-scattered layer by layer, going backward
    zero=3   weights gathered layer by layer, forward and again backward

With microbatches, zero=1 and 2 add up whole gradients and reduce them once (no_sync).
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.arrays import Params
from meshpar.collectives.microbatch import split_microbatches
from meshpar.collectives.shard_keys import for_shard
from meshpar.collectives.transport import NO_RINGS, Rings
from meshpar.collectives.varying import vary
from meshpar.errors import LayoutError
from meshpar.fsdp.gather import (
    all_reduce_grads,
    gather_shards,
    gather_with,
    reduce_scatter_grads,
)
from meshpar.fsdp.layer_scan import LayerScan, differentiable
from meshpar.fsdp.sharding import ManualSharding
from meshpar.layouts.axes import BATCH_AXES, PIPE
from meshpar.layouts.layout import Layout
from meshpar.layouts.plan import Spec, partition_spec
from meshpar.layouts.remat import REMAT_POLICIES
from meshpar.lowering.base import Lowering, model_scope
from meshpar.lowering.state import Metrics, TrainState
from meshpar.mesh.chips import chip_of
from meshpar.mesh.platform import platform_of
from meshpar.mesh.torus import ring_shape
from meshpar.models.layer_stack import Key, fold_key
from meshpar.models.model import Model

WEIGHT = "weight of the batch"
"""Among the metrics that are summed: what their means are taken over."""


def reason_unsupported(model: Model, layout: Layout) -> str:
    """Why a model cannot be lowered explicitly under a layout; "" if it can."""
    if model.layered is None:
        return "the model has no layered form (give from_nnx a meshpar.Stages)"
    for name, axes in layout.activations:
        if name == "batch" or set(axes) & set(BATCH_AXES):
            return f"activations.{name}={'+'.join(axes) or 'none'} moves the batch axes"
    for name, axes in layout.params:
        if name == "layers" and axes not in ((), (PIPE,)):
            return f"params.layers={'+'.join(axes)} splits the stack of layers"
    return ""


@dataclasses.dataclass(frozen=True)
class ShardMapLowering(Lowering):
    """`Lowering` by shard_map; for layered model."""

    name = "shard_map"
    types_replicas = True

    def __post_init__(self):
        _ = self.prefetched  # Rules that cannot be honoured fail here.

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes over which this layout splits the batch."""
        return tuple(axis for axis in BATCH_AXES if self.mesh.shape[axis] > 1)

    @property
    def manual_axes(self) -> tuple[str, ...]:
        """The axes of the shard_map; all others stay automatic."""
        return self.batch_axes

    @property
    def all_manual_axes(self) -> tuple[str, ...]:
        """The same, and that of replicas around it."""
        return (*self.replica_axes, *self.manual_axes)

    def _vary(self, x: jax.Array) -> jax.Array:
        return vary(x, self.all_manual_axes)

    @functools.cached_property
    def shardings(self) -> dict[str, ManualSharding]:
        """{path: Placement} of parameters and gradients."""
        leaves = self.plan.parameters.items()
        return {path: self._manual_sharding(path, leaf.spec) for path, leaf in leaves}

    def _manual_sharding(self, path: str, spec: Spec) -> ManualSharding:
        return ManualSharding.of(path, spec, self.manual_axes)

    @property
    def _rows(self) -> PartitionSpec:
        """Spec of a batch leaf."""
        return PartitionSpec(self.batch_axes) if self.batch_axes else PartitionSpec()

    @property
    def _specs(self) -> dict[str, PartitionSpec]:
        """{path: spec} of parameters over the manual axes alone."""
        manual = set(self.manual_axes)
        return {
            path: partition_spec(
                tuple(tuple(a for a in axes if a in manual) for axes in leaf.spec)
            )
            for path, leaf in self.plan.parameters.items()
        }

    @functools.cached_property
    def layer_shardings(self) -> dict[str, ManualSharding]:
        """The same of one layer of the stack."""
        stack = self.model.layered.split(self.shardings)[1]
        return {path: sharding.layer() for path, sharding in stack.items()}

    @functools.cached_property
    def prefetched(self) -> frozenset[str]:
        """Paths of the stack that are gathered one layer ahead."""
        split = [p for p, placed in self.layer_shardings.items() if placed.splits]
        found: set[str] = set()
        for regex in self.plan.layout.prefetch:
            hits = {path for path in split if re.search(regex, path)}
            if not hits:
                raise LayoutError(
                    f"prefetch={regex} matches no sharded parameter of the stack; "
                    f"there are {', '.join(split)}"
                )
            found |= hits
        return frozenset(found)

    @property
    def _on_cpu(self) -> bool:
        """Whether collectives move float32 instead of a smaller compute dtype.

        XLA:CPU adds in float32 anyway, and aborts on bfloat16 reductions beside
        automatic axes (its promotion pass, seen in jaxlib 0.10.2 and 0.12.0).
        """
        return platform_of(self.mesh).widens_collectives

    @functools.cached_property
    def rings(self) -> Rings:
        """The rings that hide: around them go gradients, and weights one layer ahead.

        TPUs run a reduce_scatter alone, or as an all_reduce (16 chips and more, seen
        with libtpu 0.0.51); steps of a ring hide behind the backward pass. A prefetched
        weight has all of a layer's time, but one matmul hides only one all_gather.
        """
        if not platform_of(self.mesh).hides_ring_steps:
            return NO_RINGS
        return Rings({axis: ring_shape(self.mesh, axis) for axis in self.batch_axes})

    @property
    def loop_rings(self) -> Rings:
        """The rings that nothing hides: outside the layers, and once a step."""
        return dataclasses.replace(self.rings, loop=True)

    @property
    def gather_rings(self) -> Rings:
        """The rings around which a layer's weights are gathered.

        Only v5e gathers beside compute (libtpu 0.0.51); v5p and v6e gather alone. What
        has nothing to hide behind, outside the layers, is gathered at once.
        """
        chip = chip_of(self.mesh.devices.flat[0].device_kind)
        return NO_RINGS if chip and chip.gathers_beside_compute else self.rings

    def wire_dtype(self, dtype: Any) -> Any:
        """The dtype in which weights of a compute dtype travel."""
        wider = self._on_cpu and jnp.issubdtype(dtype, jnp.floating)
        return jnp.promote_types(dtype, jnp.float32) if wider else dtype

    @property
    def gathers_layers(self) -> bool:
        """Whether weights are gathered layer by layer."""
        return self.plan.layout.zero_level == 3 and self._splits_any

    @property
    def _splits_any(self) -> bool:
        return any(sharding.splits for sharding in self.shardings.values())

    @property
    def reduces_early(self) -> bool:
        """Whether gradients are reduced inside the backward pass."""
        layout = self.plan.layout
        once = layout.zero_level == 2 and layout.microbatches == 1
        return self.gathers_layers or (once and self._splits_any)

    @property
    def reduces_shared_early(self) -> bool:
        """The same of embedding, head and whatever stands outside the stack."""
        return self.reduces_early

    @property
    def layer_passes(self) -> list[tuple[str, int, int]]:
        """(name, times, layers) of every pass over the layers in one step."""
        times, depth = self.plan.layout.microbatches, self.model.layered.depth
        return [("forward", times, depth), ("backward", times, depth)]

    def gradients(self, state: TrainState, batch: Any) -> tuple[Metrics, Params]:
        """Loss, aux and gradients, sharded as the plan says, before clipping."""
        outputs = PartitionSpec(), self._specs
        return self._mapped(self._gradients, outputs)(state.params, state.key(), batch)

    def _mapped(self, fn: Callable, out_specs: Any) -> Callable:
        """Runs fn(params, key, batch) on shards, every axis of ours manual."""
        if not self.manual_axes:
            return fn
        return jax.shard_map(
            fn,
            in_specs=(self._specs, PartitionSpec(), self._rows),
            out_specs=out_specs,
            axis_names=set(self.manual_axes),
        )

    def _gradients(
        self, params: Params, key: jax.Array, batch: Any
    ) -> tuple[Metrics, Params]:
        """`gradients` on one shard of the batch."""
        key = self._shard_key(key)
        leaves, whole = self._leaves(params)
        with model_scope(self.plan.layout, self.mesh, self.all_manual_axes):
            sums = self._sums(leaves, whole, batch, key)
        return self._reduce(*sums, params)

    def _shard_key(self, key: jax.Array) -> jax.Array:
        if not self.batch_axes:
            return key
        return for_shard(key, lax.axis_index(self.batch_axes))

    def _leaves(self, params: Params) -> tuple[Params, Params]:
        """What the loss is differentiated by, and weights that are whole already."""
        wire = params if self._on_cpu else self.cast(params)
        shards = {path: self._vary(x) for path, x in wire.items()}
        if self.gathers_layers:
            return shards, {}
        whole = gather_shards(shards, self.shardings)
        return (shards if self.reduces_early else self.cast(whole)), whole

    def _sums(
        self, leaves: Params, whole: Params, batch: Any, key: jax.Array
    ) -> tuple[Metrics, Params]:
        """Metrics and gradients summed over this shard's samples."""

        def one(batch: Any, key: jax.Array) -> tuple[Metrics, Params]:
            def loss_fn(leaves: Params) -> tuple[jax.Array, Metrics]:
                return self._weighted(*self._loss(leaves, whole, batch, key))

            weighted, backward, metrics = jax.vjp(loss_fn, leaves, has_aux=True)
            return metrics, backward(jnp.ones_like(weighted))[0]

        if self.plan.layout.microbatches == 1:
            return one(batch, key)
        return self._accumulate(one, batch, key)

    def _weighted(self, loss: jax.Array, aux: Metrics) -> tuple[jax.Array, Metrics]:
        """The loss times its weight, and all metrics in that unit."""
        weight = self._vary(jnp.float32(aux.get("weight", 1.0)))
        metrics = {
            name: lax.stop_gradient(weight) * self._vary(jnp.float32(x))
            for name, x in ({"loss": loss} | aux).items()
            if name != "weight"
        }
        given = {"weight": weight} if "weight" in aux else {}
        return metrics["loss"], {WEIGHT: weight, **metrics, **given}

    def _accumulate(
        self, one: Any, batch: Any, key: jax.Array
    ) -> tuple[Metrics, Params]:
        """Sums of `one` over the microbatches, in float32."""
        num = self.plan.layout.microbatches
        batches = split_microbatches(batch, num)
        shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], batches), key)
        zeros = jax.tree.map(
            lambda x: self._vary(jnp.zeros(x.shape, jnp.float32)), shapes
        )

        def body(sums: Any, m_batch: tuple[jax.Array, Any]) -> tuple[Any, None]:
            new = one(m_batch[1], fold_key(key, m_batch[0]))
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, new), None

        return lax.scan(body, zeros, (jnp.arange(num), batches))[0]

    def _reduce(
        self, metrics: Metrics, gradients: Params, params: Params
    ) -> tuple[Metrics, Params]:
        """From sums on every device to means over the whole batch."""
        means = self._means(metrics)
        weight = means.pop(WEIGHT)
        if self._on_cpu:
            gradients = {path: x.astype(jnp.float32) for path, x in gradients.items()}
        gradients = self._scattered(gradients)
        gradients = all_reduce_grads(gradients, self.shardings)
        gradients = {
            path: (x.astype(jnp.float32) / weight).astype(params[path].dtype)
            for path, x in gradients.items()
        }
        return means, gradients

    def _means(self, metrics: Metrics) -> Metrics:
        """From sums on every device to means, and the weight of the whole batch."""
        names = [name for name in metrics if name != "weight"]
        sums = lax.psum(jnp.stack([metrics[name] for name in names]), self.manual_axes)
        total = dict(zip(names, sums, strict=True))
        weight = total[WEIGHT]
        means = {name: x / weight for name, x in total.items()} | {WEIGHT: weight}
        return means | ({"weight": weight} if "weight" in metrics else {})

    def _scattered(self, gradients: Params) -> Params:
        """What is whole yet reduce-scattered, layer by layer to save memory."""
        shared, stack = self.model.layered.split(gradients)
        if self._splits_any and not self.reduces_shared_early:
            shared = reduce_scatter_grads(shared, self.shardings, self.loop_rings)
        if self._splits_any and not self.reduces_early:
            layers, rings = self.layer_shardings, self.loop_rings
            stack = lax.map(
                lambda layer: reduce_scatter_grads(layer, layers, rings), stack
            )
        return {**shared, **stack}

    def _loss(
        self, leaves: Params, whole: Params, batch: Any, key: Key
    ) -> tuple[jax.Array, Metrics]:
        """The model's loss on this shard, with weights made whole as `zero` says."""
        layered = self.model.layered
        whole_shared, whole_stack = layered.split(whole)
        shared, stack = layered.split(leaves)

        def scan(_: Any, stack: Params, x: Any, key: Key) -> Any:
            run = differentiable(self._layers(key))
            return run(stack, whole_stack, jax.tree.map(self._vary, x))

        if self.reduces_early:
            shardings = layered.split(self.shardings)[0]
            shared = gather_with(
                lambda leaves: self._whole(leaves, whole_shared, shardings),
                lambda gradient: self._reduced(gradient, shardings, self.loop_rings),
            )(shared)
        return layered.loss({**self.cast(shared), **stack}, batch, key, scan)

    def _layers(self, key: Key) -> LayerScan:
        """The stack, whose layer i has the key `fold_in(key, i)`."""

        @self._remat
        def one(weights: Params, x: Any, i: jax.Array) -> Any:
            y = self.model.layered.layer(self.cast(weights), x, fold_key(key, i))
            return jax.tree.map(self._vary, y)

        shardings = self.layer_shardings
        return LayerScan(
            one,
            self._whole_layer,
            lambda gradient: self._reduced(gradient, shardings, self.rings),
            self.prefetched,
        )

    def _whole_layer(self, leaves: Params, whole: Params) -> Params:
        ahead = self.prefetched.issuperset(leaves)
        rings = self.rings if ahead else self.gather_rings
        return self._whole(leaves, whole, self.layer_shardings, rings)

    def _whole(
        self,
        leaves: Params,
        whole: Params,
        shardings: dict[str, ManualSharding],
        rings: Rings = NO_RINGS,
    ) -> Params:
        """Whole weights on the wire's dtype, from what is differentiated."""
        if self.gathers_layers:
            return gather_shards(leaves, shardings, rings)
        return whole if self.reduces_early else leaves

    def _reduced(
        self, gradient: Params, shardings: dict[str, ManualSharding], rings: Rings
    ) -> Params:
        """Gradient of what is differentiated, from that of the whole weights."""
        if self.reduces_early:
            return reduce_scatter_grads(gradient, shardings, rings)
        return gradient

    def _remat(self, one: Any) -> Any:
        """What the backward pass of a layer may reuse beside its input."""
        if self.plan.layout.remat == "none":
            return one
        policy = REMAT_POLICIES[self.plan.layout.remat]()
        return jax.checkpoint(one, policy=policy, prevent_cse=False)
