"""What each lowering declares: the terms of its contract, with bytes and reasons."""

import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.collectives.transport import NO_RINGS
from meshpar.contracts import cost
from meshpar.contracts.contract import Contract, DeclaredCollective
from meshpar.fsdp.terms import FsdpTerms, Shapes, num_bytes
from meshpar.lowering.base import Lowering
from meshpar.lowering.shard_map import ShardMapLowering
from meshpar.pipeline.buffers import AXIS
from meshpar.pipeline.lowering import PipelineLowering
from meshpar.pipeline.pipedream import PipeDreamLowering

_SUBLAYERS = 2
_FORWARD, _BACKWARD, _OUTSIDE = 3, 8, 24
"""Gathers of the activations that one sublayer, and embedding with head, may cost.

Megatron's sequence parallelism needs a gather before and a reduce_scatter after each
sublayer. A compiler may reduce whole (twice as dear), and going backward once for each
of up to three projections that read the same input.
"""


def declare_collectives(lowering: Lowering, batch: Any, num_metrics: int) -> Contract:
    """The contract of one training step.

    Args:
      lowering: explicit or automatic.
      batch: abstract global batch.
      num_metrics: scalars that the gradient function returns beside the gradients.
    """
    terms = [*_scalars(lowering)]
    if isinstance(lowering, PipeDreamLowering):
        terms += [*_asynchronous_terms(lowering, num_metrics)]
        terms += [*_tensor_terms(lowering, batch)]
        terms += [*_send_terms(lowering, batch)]
    elif isinstance(lowering, ShardMapLowering):
        terms += [*_gradient_terms(lowering, num_metrics)]
        terms += [*_tensor_terms(lowering, batch)]
        if isinstance(lowering, PipelineLowering):
            terms += [*_send_terms(lowering, batch)]
            terms += [*_vocabulary_terms(lowering, batch)]
    else:
        if used := _inside(lowering):
            why = "lowering=jit: the compiler chooses"
            terms.append(
                DeclaredCollective(
                    "any", used, _ways(lowering, used), 0, math.inf, why, True
                )
            )
    return Contract(tuple(terms))


def _inside(lowering: Lowering) -> tuple[str, ...]:
    """The axes in use, but for that of replicas, over which no step moves anything."""
    sizes = lowering.mesh.shape.items()
    return tuple(a for a, n in sizes if n > 1 and a not in lowering.replica_axes)


def _ways(lowering: Lowering, axes: Iterable[str]) -> int:
    return math.prod(lowering.mesh.shape[axis] for axis in axes)


def _scalars(lowering: Lowering) -> Iterator[DeclaredCollective]:
    """Global norm, and means of an optimizer that reduces over whole tensors."""
    used = _inside(lowering)
    if not used:
        return
    plan, size = lowering.plan, 8 * len(lowering.plan.parameters)
    whole = {leaf.shape for leaf in plan.parameters.values()}
    for leaf in plan.optimizer:
        if leaf.shape and leaf.shape not in whole:
            size += 2 * math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
    why = "global norm, and the optimizer's means over whole tensors"
    yield DeclaredCollective(
        "all_reduce", used, _ways(lowering, used), 0, size, why, True
    )


def _gradient_terms(
    lowering: ShardMapLowering, num_metrics: int
) -> Iterator[DeclaredCollective]:
    """What the explicit lowering moves over its manual axes."""
    if not lowering.manual_axes:
        return
    manual, ways = lowering.manual_axes, _ways(lowering, lowering.manual_axes)
    yield DeclaredCollective(
        "all_reduce", manual, ways, 1, 4 * num_metrics, "loss and metrics"
    )
    layout, declared = lowering.plan.layout, FsdpTerms(lowering.mesh.shape)
    # Sums over microbatches are float32; of a single one gradients go as they are.
    summed = layout.microbatches > 1 or layout.pipe > 1
    kept = jnp.float32 if summed else None
    yield from _gather_terms(lowering, declared)
    yield from _scatter_terms(lowering, declared, kept)
    why = "gradients, over the axes that replicate the tensor"
    shards = _stage_shapes(lowering, kept, sharded=True)
    yield from declared.reduced_terms(shards, lowering.shardings, why)


def _stage_shapes(
    lowering: ShardMapLowering, dtype: Any = None, sharded: bool = False
) -> Shapes:
    """Weights of one pipeline stage, whole or as shards, on the wire's dtype."""
    made = {}
    for path, leaf in lowering.plan.weights.items():
        shape = list(leaf.shape)
        for dim, axes in enumerate(leaf.spec):
            shape[dim] //= _ways(lowering, {*axes} & {AXIS})
        for dim, axes in lowering.shardings[path].splits if sharded else ():
            shape[dim] //= _ways(lowering, axes)
        kind = dtype or lowering.wire_dtype(leaf.dtype)
        made[path] = jax.ShapeDtypeStruct(tuple(shape), kind)
    return made


def _one_layer(stack: Shapes) -> Shapes:
    return {p: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for p, x in stack.items()}


_OUTSIDE_THE_STACK = "embedding, head and the like"


def _gather_terms(
    lowering: ShardMapLowering, declared: FsdpTerms
) -> Iterator[DeclaredCollective]:
    layout, whole = lowering.plan.layout, _stage_shapes(lowering)
    shardings, why = lowering.shardings, f"zero={layout.zero_level}: weights"
    gathers = functools.partial(declared.split_terms, "all_gather")
    rings, at_once = lowering.gather_rings, NO_RINGS
    if not lowering.gathers_layers:
        yield from gathers(whole, shardings, 1, f"{why} gathered once a step", at_once)
        return
    shared, stack = lowering.model.layered.split(whole)
    times = layout.microbatches if lowering.reduces_shared_early else 1
    outside = f"{why}: {_OUTSIDE_THE_STACK}"
    yield from gathers(shared, shardings, times, outside, at_once)
    layer, layers = _one_layer(stack), lowering.layer_shardings
    ahead = {p: layer.pop(p) for p in list(layer) if p in lowering.prefetched}
    for name, runs, depth in lowering.layer_passes:
        inside, early = f"layer by layer, {name}", f"one layer ahead, {name}"
        yield from gathers(layer, layers, runs * depth, f"{why}: {inside}", rings)
        times, around = runs * (depth + 1), lowering.rings
        yield from gathers(ahead, layers, times, f"{why}: {early}", around)


def _scatter_terms(
    lowering: ShardMapLowering, declared: FsdpTerms, kept: Any
) -> Iterator[DeclaredCollective]:
    """Reduce_scatters of gradients, which are added up in the dtype `kept`."""
    layout, split = lowering.plan.layout, lowering.model.layered.split
    scatters = functools.partial(
        declared.split_terms, "reduce_scatter", rings=lowering.rings
    )
    early, why = lowering.reduces_shared_early, f"zero={layout.zero_level}: gradients"
    shared = split(_stage_shapes(lowering, None if early else kept))[0]
    times, outside = layout.microbatches if early else 1, f"{why}: {_OUTSIDE_THE_STACK}"
    yield from scatters(shared, lowering.shardings, times, outside)
    early = lowering.reduces_early
    stack = split(_stage_shapes(lowering, None if early else kept))[1]
    times, inside = next(iter(stack.values())).shape[0], "once a step"
    if early:
        _, runs, depth = lowering.layer_passes[-1]
        times, inside = runs * depth, "going backward"
    inside = f"{why}: layer by layer, {inside}"
    yield from scatters(_one_layer(stack), lowering.layer_shardings, times, inside)


def _send_terms(lowering: PipelineLowering, batch: Any) -> Iterator[DeclaredCollective]:
    """What the stages of a pipeline send each other."""
    layout, executor = lowering.plan.layout, lowering.executor
    num, leaves = layout.sizes[AXIS], _activations(lowering, batch)
    size = sum(map(num_bytes, leaves))
    sends = executor.num_sends, executor.num_gradient_sends
    names = "activations to the next stage", "gradients to the stage before"
    if layout.tensor == 1:
        for count, why in zip(sends, names, strict=True):
            runs = count * len(leaves)
            yield DeclaredCollective("permute", (AXIS,), num, runs, count * size, why)
        return
    # Between blocks the model may split them over `tensor`, or not.
    count, why = sum(sends), f"at most: {', '.join(names)}"
    yield DeclaredCollective("permute", (AXIS,), num, count, count * size, why, True)


def _asynchronous_terms(
    lowering: PipeDreamLowering, num_metrics: int
) -> Iterator[DeclaredCollective]:
    """What PipeDream reduces: gradients in every tick, and at the end the edges."""
    layout, plan = lowering.plan.layout, lowering.plan
    ticks, manual = lowering.arrangement.schedule.num_ticks, lowering.manual_axes
    ways = _ways(lowering, manual)
    yield DeclaredCollective(
        "all_reduce", manual, ways, 1, 4 * num_metrics, "loss and metrics"
    )
    shapes, declared = (
        _stage_shapes(lowering, jnp.float32),
        FsdpTerms(lowering.mesh.shape),
    )
    if lowering.batch_axes:
        local = [declared.local(x, lowering.shardings[p]) for p, x in shapes.items()]
        size, axes = ticks * sum(map(num_bytes, local)), lowering.batch_axes
        ways, why = _ways(lowering, axes), "gradients of every minibatch"
        yield DeclaredCollective(
            "all_reduce", axes, ways, ticks * (len(local) + 1), size, why
        )
        why = "its weight, if the model gives one"
        yield DeclaredCollective("all_reduce", axes, ways, 0, 4 * ticks, why, True)
    shared, stack = lowering.model.layered.split(plan.parameters)
    edges = [leaf.bytes_per_device for leaf in shared.values()] + [
        leaf.bytes_per_device
        for leaf in plan.optimizer
        if not any(f"['{path}']" in leaf.path for path in stack)
    ]
    size, count = sum(edges) + 4 * layout.microbatches, len(edges) + 1
    why = "embedding and head from the stages that train them, once a step; norms"
    yield DeclaredCollective("all_reduce", (AXIS,), layout.pipe, count, size, why)


def _vocabulary_terms(
    lowering: PipelineLowering, batch: Any
) -> Iterator[DeclaredCollective]:
    """What embedding and head over all stages cost: a bound on their all_reduces.

    In every tick that uses them x once for the embedding and once for its gradient, and
    for the head x, its gradient and some numbers per token.
    """
    if not lowering.plan.layout.splits_vocabulary:
        return
    ticks = lowering.executor.ticks
    units = ticks("forward") + 3 * ticks("head") + ticks("backward")
    size = units * _activation_bytes(lowering, batch)
    num = lowering.plan.layout.sizes[AXIS]
    why = f"vocab=pipe: at most {units} activations, for embedding and head"
    yield DeclaredCollective("all_reduce", (AXIS,), num, 0, size, why, True)


def _activations(lowering: ShardMapLowering, batch: Any) -> list[jax.ShapeDtypeStruct]:
    """What one device's microbatch is between two layers, in the wire's dtype."""
    params = {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in lowering.plan.weights.items()
    }
    embed, layout = lowering.model.layered.embed, lowering.plan.layout
    ways = layout.num_batch_shards * layout.microbatches
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // ways, *x.shape[1:]), x.dtype),
        batch,
    )
    x = jax.eval_shape(lambda p, b: embed(p, b, None), params, rows)
    return [
        leaf.update(dtype=lowering.wire_dtype(leaf.dtype))
        for leaf in jax.tree.leaves(x)
    ]


def _activation_bytes(lowering: ShardMapLowering, batch: Any) -> int:
    return sum(map(num_bytes, _activations(lowering, batch)))


def _tensor_terms(
    lowering: ShardMapLowering, batch: Any
) -> Iterator[DeclaredCollective]:
    """A bound on what the compiler moves for tensor parallelism."""
    axes = tuple(a for a in _inside(lowering) if a not in lowering.manual_axes)
    if not axes:
        return
    ways, layout = _ways(lowering, axes), lowering.plan.layout
    size = _activation_bytes(lowering, batch)
    unit = cost.wire_bytes("all_gather", size, ways)
    recomputed = _FORWARD if layout.remat != "none" else 0
    units = 0
    for name, runs, depth in lowering.layer_passes:
        backward = _BACKWARD + recomputed if name == "backward" else 0
        units += runs * depth * _SUBLAYERS * (backward or _FORWARD)
        units += runs * _OUTSIDE // 2
    why = f"activations: at most {units} gathers of {unit:.0f} bytes"
    yield DeclaredCollective("any", axes, ways, 0, int(units * unit), why, True)
