"""Predicts the memory of a training step on one device, by kind, without compiling.

State is exact (it is the plan's). Activations come from tracing one layer: what it
keeps for the backward pass, times the depth, and what it holds while it runs.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.layouts.layout import Layout
from meshpar.layouts.plan import Plan
from meshpar.layouts.remat import REMAT_POLICIES
from meshpar.lowering.base import Lowering, model_scope
from meshpar.pipeline.lowering import PipelineLowering
from meshpar.pipeline.pipedream import PipeDreamLowering


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device during a training step.

    Attributes:
      parameters: master weights.
      optimizer: optimizer state.
      weights: copies in the compute dtype.
      gradients: as the backward pass holds them.
      activations: kept by all layers for the backward pass.
      working: what one layer, or the head, holds while it runs backward: its whole
        weights, their gradient and its activations.
      synchronization: what synchronizes replicas (local SGD).
    """

    parameters: int
    optimizer: int
    weights: int
    gradients: int
    activations: int
    working: int
    synchronization: int = 0

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class _Traced:
    """Bytes on one device, from tracing one layer and the head of a microbatch.

    Attributes:
      x: activations between two layers.
      kept: what a layer keeps for its backward pass.
      running: what it holds while it runs backward.
      head: what embedding and head hold.
      layer_weights: whole weights of one layer.
      largest: the largest weight outside the stack, whole.
    """

    x: int
    kept: int
    running: int
    head: int
    layer_weights: int
    largest: int


def _traced(lowering: Lowering, batch: Any) -> _Traced:
    layered, layout = lowering.model.layered, lowering.plan.layout
    shared, stack = layered.split(
        {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for path, leaf in lowering.plan.weights.items()
        }
    )
    one = {p: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for p, x in stack.items()}
    rows = jax.tree.map(lambda x: _part(x, layout.microbatches), batch)
    tensor = layout.tensor
    ways = layout.num_batch_shards * tensor
    with jax.set_mesh(lowering.mesh), model_scope(layout, lowering.mesh):
        key = jax.eval_shape(lambda: jax.random.key(0))

        def layer(weights: Any, x: Any, key: jax.Array) -> Any:
            return layered.layer(weights, x, key)

        def head(shared: Any, x: Any, rows: Any, key: jax.Array) -> jax.Array:
            return layered.head_loss(shared, x, rows, key)[0]

        x = jax.eval_shape(layered.embed, shared, rows, key)
        return _Traced(
            x=_bytes(x) // ways,
            kept=_residuals(_remat(layer, layout), one, x, key) // ways,
            running=_residuals(layer, one, x, key) // ways,
            head=_residuals(head, shared, x, rows, key) // ways,
            layer_weights=_bytes(one) // tensor,
            largest=max((_bytes([x]) for x in shared.values()), default=0) // tensor,
        )


def predict_memory(
    lowering: Lowering, batch: Any, plan: Plan | None = None
) -> Memory | None:
    """Predicts a step's memory; None for models without stages.

    Args:
      lowering: explicit or automatic.
      batch: abstract batch of one replica.
      plan: what is kept from step to step; by default the plan of the lowering.
    """
    plan = plan or lowering.plan
    if lowering.model.layered is None:
        return None
    state, traced = plan.bytes_per_device(), _traced(lowering, batch)
    copies = lowering.compute_dtype is not None or plan.layout.zero_level < 3
    weights, gradients = state["weights"] if copies else 0, state["gradients"]
    depth, activations = lowering.model.layered.depth, 0
    if isinstance(lowering, PipelineLowering):
        depth = lowering.arrangement.partition.rows
        activations = saved_bytes(lowering, batch)
        if plan.layout.save == "residuals":
            depth = 0  # The stash holds it all.
        weights, gradients = _held_by_stage(lowering)
    # Whole weights and their gradient, gathered or reduced.
    of_layer, of_head = 2 * traced.layer_weights, 3 * traced.largest + traced.head
    if plan.layout.splits_vocabulary:
        of_head //= plan.layout.pipe
    return Memory(
        parameters=state["parameters"],
        optimizer=state["optimizer"],
        weights=weights,
        gradients=gradients,
        activations=activations + depth * traced.kept,
        working=max(of_layer + traced.running, of_head),
        synchronization=state["synchronization"],
    )


def saved_bytes(lowering: PipelineLowering, batch: Any) -> int:
    """Bytes on one device that a pipeline keeps between forward and backward passes.

    Args:
      lowering: of a pipeline.
      batch: abstract global batch.
    """
    traced, tables = _traced(lowering, batch), lowering.tables
    waiting = tables.num_inputs + tables.num_gradients + 3
    kept = traced.x
    if lowering.plan.layout.save == "residuals":
        kept = lowering.arrangement.partition.rows * traced.kept
    if isinstance(
        lowering, PipeDreamLowering
    ):  # The weights that a minibatch met, too.
        leaves = lowering.plan.weights.values()
        kept += sum(leaf.bytes_per_device for leaf in leaves)
    total = (tables.num_saved + 1) * kept + waiting * traced.x
    if tables.num_states:
        # What W needs of a layer is about what the layer holds while it runs.
        state = lowering.arrangement.partition.rows * traced.running
        total += (tables.num_states + 1) * state
    return total


def _held_by_stage(lowering: PipelineLowering) -> tuple[int, int]:
    """(weights, sums of their gradients) that a stage holds all through the ticks.

    Whole over the batch axes, but for the stack under zero=3; sums are float32.
    """
    weights = gradients = 0
    plan = lowering.plan
    shared = lowering.model.layered.split(plan.weights)[0]
    for path, leaf in plan.weights.items():
        sharded = lowering.gathers_layers and path not in shared
        axes = {axis for dim in leaf.spec for axis in dim}
        split = axes if sharded else axes - set(lowering.batch_axes)
        ways = math.prod(plan.layout.sizes[axis] for axis in split)
        size = math.prod(leaf.shape) // ways
        weights += size * jnp.dtype(leaf.dtype).itemsize
        gradients += size * 4
    return weights, gradients


def _part(x: Any, ways: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0] // ways, *x.shape[1:]), x.dtype)


def _remat(layer: Any, layout: Layout) -> Any:
    if layout.remat == "none":
        return layer
    return jax.checkpoint(layer, policy=REMAT_POLICIES[layout.remat]())


def _residuals(fn: Any, weights: Any, *args: Any) -> int:
    """Bytes that the backward pass of fn(weights, x, ...) keeps, weights aside."""

    def kept(weights: Any, x: Any, *rest: Any) -> list[jax.Array]:
        vjp = jax.vjp(lambda weights, x: fn(weights, x, *rest), weights, x)[1]
        leaves = jax.tree.leaves(vjp)
        own = jax.tree.leaves(weights)
        return [x for x in leaves if not any(x is w for w in own)]

    return _bytes(jax.eval_shape(kept, weights, *args))


def _bytes(tree: Any) -> int:
    return sum(
        math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
        for x in jax.tree.leaves(tree)
        if not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    )
