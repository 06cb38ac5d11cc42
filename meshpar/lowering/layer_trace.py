"""Traces one layer of a model, for the bytes that it holds."""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from meshpar.arrays import (
    Array,
    Params,
    abstract,
    abstract_layer,
    num_bytes,
    vary,
)
from meshpar.collectives.transport import transports_for
from meshpar.fsdp.layer_scan import LayerScan, Rows
from meshpar.layouts.axes import TENSOR, TOKEN_AXES, in_use, ways_of
from meshpar.layouts.layout import Layout
from meshpar.layouts.plan import Plan, partition_spec
from meshpar.layouts.remat import KEEPS_MATMULS, NONE, average, segments
from meshpar.layouts.scope import with_policy
from meshpar.lowering.batches import batch_specs
from meshpar.mesh.chips import chip_of
from meshpar.models.layer_stack import LayeredModel
from meshpar.models.model_scope import model_scope


class TracedLayer(NamedTuple):
    """Bytes on one device, from tracing one layer with a microbatch.

    Attributes:
      x: activations between two layers.
      saved: saved by a layer for its backward pass; by layers whose policies differ, on
        average.
      running: held by a layer while it runs backward.
      deferred: held from the gradient of a layer's input to that of its weights, where
        a schedule splits the two; on average, too.
      largest: the largest weight outside the stack, as a device computes with it.
    """

    x: int
    saved: int
    running: int
    deferred: int
    largest: int


def trace_layer(
    layered: LayeredModel, plan: Plan, mesh: Mesh, batch: Any
) -> TracedLayer:
    """Traces one layer with one microbatch.

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
            lanes = _lanes(mesh)
            traced.append(_trace(layered, plan, shards, lanes, *weights, rows, key))
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
    lanes: int,
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

    x = layered.embed(shared, rows, key)
    context = layered.context(shared, rows, key)
    trained, kept = frozenset(plan.gradients), layered.kept
    args = trained, layer_weights, x, key, context

    def mean(bytes_of: Callable[..., int]) -> int:
        def of_policy(policy: str) -> int:
            wrapped = with_policy(layer, policy)
            return bytes_of(lanes, wrapped, *args, kept=kept) // ways

        return math.ceil(average(layout.remat, layered.depth, of_policy))

    return TracedLayer(
        x=_tree_bytes(x) // ways,
        saved=mean(_residual_bytes),
        running=_residual_bytes(lanes, layer, *args, kept=kept) // ways,
        deferred=mean(_deferred_bytes),
        largest=largest_weight(layered, plan),
    )


def gathered_bytes(traced: TracedLayer, layout: Layout, mesh: Mesh) -> int:
    """Bytes of a whole activation, if layers hold such beside what the trace shows.

    Matmuls over `tensor` gather them in one collective (GPUs). Where a policy of
    `remat` keeps the results of matmuls those are more; rings (TPUs) use their parts.
    """
    policies = {policy for policy, _ in segments(layout.remat, 1)}
    if layout.tensor == 1 or policies <= {NONE, *KEEPS_MATMULS}:
        return 0
    rings = transports_for(mesh, (TENSOR,)).gradients.covers((TENSOR,))
    return 0 if rings else traced.x * layout.tensor


def largest_weight(layered: LayeredModel, plan: Plan) -> int:
    """Bytes of the largest weight outside the stack, as a device computes with it."""

    def whole(path: str) -> int:
        leaf = plan.weights[path]
        ways = ways_of(itertools.chain(*leaf.held), plan.layout.sizes)
        return math.prod(leaf.shape) // ways * jnp.dtype(leaf.dtype).itemsize

    return max(map(whole, layered.split(plan.weights)[0]), default=0)


def _microbatch(x: Any, num: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0] // num, *x.shape[1:]), x.dtype)


def _residual_bytes(
    lanes: int,
    fn: Callable,
    trained: frozenset[str],
    weights: Any,
    *args: Any,
    kept: Callable[[Any], Any] = lambda x: (),
) -> int:
    """Bytes that the backward pass of fn(weights, x, ...) saves, but for arguments.

    Args:
      lanes: as for `_tree_bytes`.
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

    return _tree_bytes(residuals(weights, *args), lanes)


def _deferred_bytes(
    lanes: int,
    layer: Callable,
    trained: frozenset[str],
    weights: Params,
    x: Any,
    key: Array,
    context: Any,
    kept: Callable[[Any], Any],
) -> int:
    """Bytes that the first part of a backward pass hands over to the second part.

    Takes the arguments of `_residual_bytes`, and the key and context of the layer.
    """
    stack = {path: w[None] for path, w in weights.items()}
    leaves = {path: w for path, w in stack.items() if path in trained}
    constants = {path: w for path, w in stack.items() if path not in trained}
    scan = LayerScan(
        lambda weights, x, _, context: layer(weights, x, key, context),
        lambda leaves, constants: leaves | constants,
        lambda gradient: gradient,
        context,
        kept,
    )
    rows = Rows(0, jnp.zeros(1, jnp.int32))
    y, residuals = scan.forward(leaves, constants, x, rows)
    state = scan.backward_input(leaves, constants, residuals, y, rows)[1]
    return _tree_bytes(state.arrays, lanes)


def _lanes(mesh: Mesh) -> int:
    """Elements to which the devices of a mesh pad the last dim of an array."""
    chip = chip_of(mesh.devices.flat[0].device_kind)
    return chip.tile[1] if chip else 1


def _tree_bytes(tree: Any, lanes: int = 1) -> int:
    """Bytes of all arrays of a tree, random keys aside.

    Args:
      tree: of arrays.
      lanes: elements to which the last dim is padded. A compiler puts another dim last
        where the padding would be more than half.
    """
    return sum(
        num_bytes(x) * _padding(x.shape, lanes)
        for x in jax.tree.leaves(tree)
        if not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    )


def _padding(shape: tuple[int, ...], lanes: int) -> int:
    """How many times its own bytes a padded array takes."""
    return 2 if len(shape) > 2 and 2 * shape[-1] == lanes else 1
