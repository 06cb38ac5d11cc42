"""Traces one layer of a model, for the bytes that it holds."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from meshpar.arrays import Array, Params, abstract, abstract_layer, vary
from meshpar.jaxprs.walk import written
from meshpar.layouts import layer_uses
from meshpar.layouts.axes import PIPE, REPLICA, TENSOR, TOKEN_AXES, in_use, ways_of
from meshpar.layouts.layout import Layout
from meshpar.layouts.mixes import average, segments
from meshpar.layouts.plan import LeafPlan, Plan, partition_spec
from meshpar.layouts.remat import KEEPS_MATMULS, NONE, wrap_remat
from meshpar.layouts.scope import current_scope, with_policy
from meshpar.lowering.batches import batch_specs
from meshpar.lowering.layer_residuals import (
    Deferred,
    deferred_bytes,
    fused_bytes,
    grouped_rows,
    logits_bytes,
    residuals_of,
)
from meshpar.lowering.padding import lanes_of, tree_bytes
from meshpar.mesh.chips import chip_of
from meshpar.mesh.platform import platform_of
from meshpar.models.layer_stack import LayeredModel
from meshpar.models.model_scope import model_scope
from meshpar.replicated import map_rows

T = TypeVar("T")


class TracedLayer(NamedTuple):
    """Bytes on one device, from tracing one layer with a microbatch.

    Attributes:
      x: activations between two layers.
      saved: saved by a layer for its backward pass; by layers whose policies differ, on
        average.
      fused: the same of layers without a loop, whose passes compilers fuse.
      running: held by a layer while it runs backward.
      grouped: rows that the grouped matmuls of a layer read and write, and that
        `tensor` splits.
      grouped_whole: those that it does not split, with all features of a token.
      deferred: held from the gradient of a layer's input to that of its weights, where
        a schedule splits the two; on average, too.
      deferred_padding: added to that, where the compiler pads it.
      padding: added to what is saved, where the compiler pads it (`with_padding`).
      logits: of one block of the loss, in float32.
      largest: the largest weight outside the stack, as a device computes with it.
      tied: the same if embedding and head share it; 0 if each has its own.
    """

    x: int
    saved: int
    fused: int
    running: int
    grouped: int
    grouped_whole: int
    deferred: int
    deferred_padding: int
    padding: int
    logits: int
    largest: int
    tied: int

    def with_deferred(self, deferred: Deferred) -> Self:
        """This layer with bytes that one part of its backward pass hands over."""
        return self._replace(deferred=deferred.size, deferred_padding=deferred.padding)


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
    traced = trace_unpadded(layered, plan, mesh, batch)
    layout, device = plan.layout, mesh.devices.flat[0]
    rows = layer_uses.splits_rows(layout.layers)
    return with_padding(traced, layout.tensor > 1 and not rows, device)


def trace_unpadded(
    layered: LayeredModel, plan: Plan, mesh: Mesh, batch: Any
) -> TracedLayer:
    """`trace_layer` without padding in saved values; takes the same arguments."""
    remat, args = plan.layout.remat, (layered, plan, mesh, batch)
    policies = {policy for policy, _ in segments(remat, layered.depth)}
    traced = trace_policies(*args, policies)
    if plan.layout.pipe > 1:
        for policy, size in trace_deferred(*args, policies).items():
            traced[policy] = traced[policy].with_deferred(size)
    return average_layer(remat, layered.depth, traced.__getitem__)


def average_layer(
    remat: str, depth: int, of_policy: Callable[[str], TracedLayer]
) -> TracedLayer:
    """The mean over some layers, from what one layer of each policy takes."""

    def mean(name: str) -> int:
        return math.ceil(average(remat, depth, lambda p: getattr(of_policy(p), name)))

    return TracedLayer(*map(mean, TracedLayer._fields))


def trace_policies(
    layered: LayeredModel, plan: Plan, mesh: Mesh, batch: Any, policies: Iterable[str]
) -> dict[str, TracedLayer]:
    """`trace_unpadded` for each of several policies of rematerialization.

    Args:
      layered: as in `trace_layer`.
      plan: as in `trace_layer`; its layout's own policy is not read.
      mesh: as in `trace_layer`.
      batch: as in `trace_layer`.
      policies: the policies.

    Returns:
      {policy: bytes}; `deferred` is 0, as few layouts need it (`trace_deferred`).
    """
    mesh = _one_stage(mesh)

    def trace(call: _LayerCall, shards: int) -> dict[str, TracedLayer]:
        of_policy = _trace(layered, plan, mesh, shards, call)
        return {policy: of_policy(policy) for policy in policies}

    return _in_trace(layered, plan, mesh, batch, trace)


def trace_deferred(
    layered: LayeredModel, plan: Plan, mesh: Mesh, batch: Any, policies: Iterable[str]
) -> dict[str, Deferred]:
    """{policy: bytes handed over}; takes the arguments of `trace_policies`."""
    if _exchanges(plan.layout):  # Schedules that split the backward pass refuse these.
        return dict.fromkeys(policies, Deferred(0, 0))
    mesh = _one_stage(mesh)

    def trace(call: _LayerCall, shards: int) -> dict[str, Deferred]:
        lanes, ways = lanes_of(mesh), shards * plan.layout.tensor
        under, _ = written_layer(layered.layer, *call.args)
        args = frozenset(plan.gradients), *call.args

        def own(policy: str) -> Deferred:
            whole = deferred_bytes(lanes, under(policy), *args, kept=layered.kept)
            return Deferred(*(size // ways for size in whole))

        return {policy: own(policy) for policy in policies}

    return _in_trace(layered, plan, mesh, batch, trace)


class _LayerCall(NamedTuple):
    """Arguments of embedding, layer and head in a trace.

    Attributes:
      shared: weights outside the stack.
      args: the layer's weights, its activations, a key, and its context.
      rows: of the batch.
      key: a key.
    """

    shared: Params
    args: tuple[Any, ...]
    rows: Any
    key: Array


def _exchanges(layout: Layout) -> bool:
    """Whether a layer follows the tokens of each device: experts, or attention."""
    return layout.expert > 1 or layout.context > 1


def _in_trace(
    layered: LayeredModel,
    plan: Plan,
    mesh: Mesh,
    batch: Any,
    trace: Callable[[_LayerCall, int], T],
) -> T:
    """Runs `trace` on a layer with a microbatch, where the model is traced.

    That is under its layout, and on the part of one device if the layer exchanges
    tokens.

    Args:
      layered: as in `trace_layer`.
      plan: as in `trace_layer`.
      mesh: as in `trace_layer`.
      batch: as in `trace_layer`.
      trace: a function of the layer's call, and of the number of devices whose rows it
        has.
    """
    layout = plan.layout
    shared, stack = layered.split(abstract(plan.weights))
    rows = map_rows(lambda x: _microbatch(x, layout.microbatches), batch)
    axes = in_use(TOKEN_AXES, mesh.shape) if _exchanges(layout) else ()
    found: list[T] = []

    def run(*args: Any) -> Array:
        *weights, rows, key = args
        if axes:  # Marked here, or each use would make a copy that counts as saved.
            weights = jax.tree.map(lambda x: vary(x, axes), weights)
        shared, layer = weights
        with model_scope(layout, mesh, axes):
            x, context = (
                f(shared, rows, key) for f in (layered.embed, layered.context)
            )
            call = _LayerCall(shared, (layer, x, key, context), rows, key)
            found.append(trace(call, 1 if axes else layout.num_token_shards))
        return jnp.zeros(())

    with jax.set_mesh(mesh):
        key = jax.eval_shape(lambda: jax.random.key(0))
        args = shared, abstract_layer(stack), rows, key
        jax.eval_shape(_on_one_device(run, layered, plan, rows, axes), *args)
    return found[-1]


def _one_stage(mesh: Mesh) -> Mesh:
    """The devices of one stage and one replica: others would count as copies."""
    devices = mesh.devices
    for axis in (PIPE, REPLICA):
        devices = devices.take([0], mesh.axis_names.index(axis))
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def with_padding(
    traced: TracedLayer, splits_features: bool, device: jax.Device
) -> TracedLayer:
    """Adds the padding of a layer's saved values, where programs pad them.

    TPUs pad the last dim of an array to whole lanes. Compilers put another dim last
    where padding would double an array, but for the results of matmuls that a policy of
    `remat` keeps. Rings over `tensor` that merge heads with head_dim leave no such dim.

    Args:
      traced: a layer, or the mean of several.
      splits_features: whether devices split the features of all layers.
      device: that the program runs on.
    """
    chip = chip_of(device.device_kind)
    merges = splits_features and chip is not None and chip.gathers_beside_compute
    return traced if merges else traced._replace(saved=traced.saved + traced.padding)


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
    layered: LayeredModel, plan: Plan, mesh: Mesh, token_shards: int, call: _LayerCall
) -> Callable[[str], TracedLayer]:
    """A function of a policy that traces the layer, on the rows of several devices."""
    lanes, ways = lanes_of(mesh), token_shards * plan.layout.tensor
    shared, _, rows, key = call
    x = call.args[1]
    under, jaxpr = written_layer(layered.layer, *call.args)
    args, kept = (frozenset(plan.gradients), *call.args), layered.kept
    held = residuals_of(under(NONE), *args, kept=kept)
    logits = logits_bytes(layered, shared, x, rows, key)
    grouped = grouped_rows(jaxpr, x)
    largest = largest_weight(layered, plan)
    of_head = layered.read_by_head_alone(shared, rows, key)
    sizes = (whole_bytes(plan.weights[path], plan.layout.sizes) for path in of_head)
    tied = 0 if largest in sizes else largest
    # Other layouts run their layers in a loop.
    fuses = plan.layout.scan_unroll > 1 or mesh.size == 1

    def of_policy(policy: str) -> TracedLayer:
        none = policy == NONE
        saved = held if none else residuals_of(under(policy), *args, kept=kept)
        pads = policy in KEEPS_MATMULS
        padding = tree_bytes(saved, lanes) - tree_bytes(saved) if pads else 0
        saved_bytes = fused = tree_bytes(saved)
        if none and fuses:
            fused = fused_bytes(under(NONE), *args, kept=kept)
        return TracedLayer(
            x=tree_bytes(x) // ways,
            saved=saved_bytes // ways,
            fused=fused // ways,
            running=tree_bytes(held) // ways,
            grouped=grouped.split // ways,
            grouped_whole=grouped.whole // ways,
            deferred=0,
            deferred_padding=0,
            padding=padding // ways,
            logits=logits // token_shards // logits_ways(layered, plan),
            largest=largest,
            tied=tied,
        )

    return of_policy


def written_layer(layer: Callable, *args: Any) -> tuple[Callable[[str], Callable], Any]:
    """Traces a layer for all policies: (a function from a policy to it, its jaxpr).

    The layers of all policies run this jaxpr, which is differentiated once. The model's
    own code does not run again, unless it calls `layouts.remat` itself: then it follows
    each policy in its own way.
    """
    scope = current_scope()
    layout = dataclasses.replace(scope.layout, remat=NONE)
    with model_scope(layout, scope.mesh, scope.manual_axes) as own:
        traced = written(layer, *args)
    jaxpr = traced.jaxpr.jaxpr
    if own.remat_used:
        return functools.partial(with_policy, layer), jaxpr
    # One function for all policies: `jax.checkpoint` traces it once. To remember it, it
    # needs a weak reference, which tuples such as `traced` do not have.
    return functools.partial(wrap_remat, traced.__call__), jaxpr


def logits_ways(layered: LayeredModel, plan: Plan) -> int:
    """Devices along `tensor` that split the largest weight outside the stack.

    That weight is the head's, and logits are split as it is.
    """
    if plan.layout.tensor == 1:
        return 1
    shared = layered.split(plan.weights)[0].values()
    largest = max(shared, key=lambda leaf: math.prod(leaf.shape), default=None)
    splits = largest is not None and TENSOR in itertools.chain(*largest.spec)
    return plan.layout.tensor if splits else 1


def held_at_times(
    traced: TracedLayer, layered: LayeredModel, plan: Plan, mesh: Mesh
) -> dict[str, int]:
    """Fields of `memory.Held`: memory of layers and head that the trace does not show.

    A whole activation, which matmuls over `tensor` gather; it is in the trace where
    nothing is rematerialized. Logits of a block, where the platform writes them.
    """
    layout = plan.layout
    split = layer_uses.policies(layout.layers, layout.remat, layered.depth)
    gathers = layout.tensor > 1 and any(policy != NONE for policy, _ in split)
    return {
        "gathered": traced.x * layout.tensor if gathers else 0,
        "logits": platform_of(mesh).logits_in_memory(traced.logits),
        "whole_head": layout.tensor > 1 and logits_ways(layered, plan) == 1,
    }


def whole_bytes(leaf: LeafPlan, sizes: Mapping[str, int]) -> int:
    """Bytes of a weight as a device computes with it."""
    ways = ways_of(itertools.chain(*leaf.held), sizes)
    return math.prod(leaf.shape) // ways * jnp.dtype(leaf.dtype).itemsize


def largest_weight(layered: LayeredModel, plan: Plan) -> int:
    """Bytes of the largest weight outside the stack, as a device computes with it."""
    shared = layered.split(plan.weights)[0].values()
    return max((whole_bytes(leaf, plan.layout.sizes) for leaf in shared), default=0)


def _microbatch(x: Any, num: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((x.shape[0] // num, *x.shape[1:]), x.dtype)
