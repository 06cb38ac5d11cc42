"""Predicts the memory of a training step on one device, by kind, without compiling.

State is exact (it is the plan's). Activations come from tracing one layer: the bytes
that it saves for the backward pass, times the depth, and those that it holds while it
runs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from meshpar.arrays import Array, abstract, abstract_layer, num_bytes, vary
from meshpar.layouts.axes import TOKEN_AXES, in_use
from meshpar.layouts.plan import Plan, partition_spec
from meshpar.layouts.remat import wrap_remat
from meshpar.lowering.batches import batch_specs
from meshpar.models.layer_stack import LayeredModel
from meshpar.models.model_scope import model_scope


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device during a training step.

    Attributes:
      parameters: master weights.
      optimizer: optimizer state.
      weights: copies in the compute dtype.
      gradients: as the backward pass holds them.
      activations: saved by all layers for the backward pass.
      working: held by one layer, or the head, while it runs backward: its whole
        weights, their gradient and its activations.
      synchronization: state that synchronizes replicas (local SGD).
      host: in host memory, and no part of the total.
    """

    parameters: int
    optimizer: int
    weights: int
    gradients: int
    activations: int
    working: int
    synchronization: int = 0
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device at the peak."""
        return sum(dataclasses.astuple(self)) - self.host


class TracedLayer(NamedTuple):
    """Bytes on one device, from tracing one layer and the head of a microbatch.

    Attributes:
      x: activations between two layers.
      saved: saved by a layer for its backward pass.
      running: held by a layer while it runs backward.
      head: held by embedding and head.
      layer_weights: whole weights of one layer.
      layer_gradients: gradients of those that are trained.
      largest: the largest weight outside the stack, whole.
    """

    x: int
    saved: int
    running: int
    head: int
    layer_weights: int
    layer_gradients: int
    largest: int


class Held(NamedTuple):
    """Bytes that a program holds all through the passes of a step, on one device.

    Attributes:
      weights: copies in the compute dtype.
      gradients: sums of gradients.
      activations: saved between forward and backward passes.
      head_ways: devices that share embedding and head.
      chunk: the largest part of what lives in host memory that is on the device at a
        time.
    """

    weights: int
    gradients: int
    activations: int
    head_ways: int = 1
    chunk: int = 0


def trace_layer(
    layered: LayeredModel, plan: Plan, mesh: Mesh, batch: Any
) -> TracedLayer:
    """Traces one layer and the head of one microbatch.

    Args:
      layered: the model.
      plan: its weights under a layout.
      mesh: the device mesh.
      batch: abstract batch of one replica.
    """
    layout = plan.layout
    shared, stack = layered.split(abstract(plan.weights))
    rows = jax.tree.map(lambda x: _microbatch(x, layout.microbatches), batch)
    # Mixtures of experts and attention follow the tokens of each device.
    by_device = layout.expert > 1 or layout.context > 1
    axes = in_use(TOKEN_AXES, mesh.shape) if by_device else ()
    traced: list[TracedLayer] = []

    def run(*args: Any) -> Array:
        *weights, rows, key = args
        if axes:  # Marked here, or each use would make a copy that counts as saved.
            weights = jax.tree.map(lambda x: vary(x, axes), weights)
        with model_scope(layout, mesh, axes):
            shards = 1 if axes else layout.num_token_shards
            traced.append(_trace(layered, plan, shards, *weights, rows, key))
        return jnp.zeros(())

    with jax.set_mesh(mesh):
        key = jax.eval_shape(lambda: jax.random.key(0))
        args = shared, abstract_layer(stack), rows, key
        jax.eval_shape(_on_one_device(run, layered, plan, rows, axes), *args)
    return traced[0]


def _on_one_device(
    run: Callable, layered: LayeredModel, plan: Plan, rows: Any, axes: tuple[str, ...]
) -> Callable:
    """run(shared weights, those of a layer, rows, key) on the part of one device."""
    if not axes:
        return run
    specs = {
        path: partition_spec(
            tuple(tuple(a for a in dim if a in axes) for dim in leaf.held)
        )
        for path, leaf in plan.weights.items()
    }
    shared, stack = layered.split(specs)
    layer = {path: PartitionSpec(*spec[1:]) for path, spec in stack.items()}
    batch = batch_specs(plan.layout, rows, axes)
    return jax.shard_map(
        run,
        in_specs=(shared, layer, batch, PartitionSpec()),
        out_specs=PartitionSpec(),
        axis_names=set(axes),
    )


def _trace(
    layered: LayeredModel,
    plan: Plan,
    token_shards: int,
    shared: Any,
    layer_weights: Any,
    rows: Any,
    key: Array,
) -> TracedLayer:
    """`trace_layer` of the rows of several devices."""
    layout = plan.layout
    ways = token_shards * layout.tensor

    def layer(weights: Any, x: Any, key: Array, context: Any) -> Any:
        return layered.layer(weights, x, key, context)

    def head(shared: Any, x: Any, rows: Any, key: Array) -> Array:
        return layered.head_loss(shared, x, rows, key)[0]

    x = layered.embed(shared, rows, key)
    context = layered.context(shared, rows, key)
    wrapped = wrap_remat(layer, layout.remat)
    trained, kept = frozenset(plan.gradients), layered.kept
    gradients = {p: w for p, w in layer_weights.items() if p in trained}
    args = trained, layer_weights, x, key, context
    return TracedLayer(
        x=_tree_bytes(x) // ways,
        saved=_residual_bytes(wrapped, *args, kept=kept) // ways,
        running=_residual_bytes(layer, *args, kept=kept) // ways,
        head=_residual_bytes(head, trained, shared, x, rows, key) // ways,
        layer_weights=_tree_bytes(layer_weights) // layout.tensor,
        layer_gradients=_tree_bytes(gradients) // layout.tensor,
        largest=max(map(num_bytes, shared.values()), default=0) // layout.tensor,
    )


def predicted_memory(
    state: dict[str, int], traced: TracedLayer, held: Held, host: int = 0
) -> Memory:
    """The peak of one step.

    Args:
      state: bytes of the training state in one device's memory, by kind.
      traced: of one layer and the head.
      held: of the whole step.
      host: bytes in host memory.
    """
    # Whole weights and their gradient are gathered, or about to be reduced.
    layer = traced.layer_weights + traced.layer_gradients + traced.running
    head = (3 * traced.largest + traced.head) // held.head_ways
    return Memory(
        parameters=state["parameters"],
        optimizer=state["optimizer"],
        weights=held.weights,
        gradients=held.gradients,
        activations=held.activations,
        working=max(layer, head, held.chunk),
        synchronization=state["synchronization"],
        host=host,
    )


def _microbatch(x: Any, num: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0] // num, *x.shape[1:]), x.dtype)


def _residual_bytes(
    fn: Callable,
    trained: frozenset[str],
    weights: Any,
    *args: Any,
    kept: Callable[[Any], Any] = lambda x: (),
) -> int:
    """Bytes that the backward pass of fn(weights, x, ...) saves, but for arguments.

    Args:
      fn: the function.
      trained: paths of the weights that have a gradient.
      weights: its weights.
      *args: x and other arguments.
      kept: x -> arrays in it that are not counted, either.
    """

    def residuals(weights: Any, x: Any, *rest: Any) -> list[Array]:
        def run(leaves: Any, x: Any) -> Any:
            return fn(weights | leaves, x, *rest)

        vjp = jax.vjp(run, {p: w for p, w in weights.items() if p in trained}, x)[1]
        own = jax.tree.leaves((weights, rest, kept(x)))
        return [x for x in jax.tree.leaves(vjp) if not any(x is w for w in own)]

    return _tree_bytes(residuals(weights, *args))


def _tree_bytes(tree: Any) -> int:
    """Bytes of all arrays of a tree, random keys aside."""
    return sum(
        num_bytes(x)
        for x in jax.tree.leaves(tree)
        if not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    )
