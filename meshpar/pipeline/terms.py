"""Declared collectives of a pipeline, and the bytes that its stages hold."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from meshpar.arrays import num_bytes
from meshpar.contracts.declared import DeclaredCollective
from meshpar.fsdp.zero import Zero
from meshpar.layouts.axes import PIPE
from meshpar.lowering.frame import Frame
from meshpar.lowering.layer_trace import TracedLayer
from meshpar.lowering.memory import Held
from meshpar.lowering.padding import lanes_of
from meshpar.lowering.trained_layers import differentiates_layers
from meshpar.mesh.chips import chip_of
from meshpar.pipeline.phases import TickLoop
from meshpar.schedules.ticks import Tables


def declared_sends(
    frame: Frame, loop: TickLoop, batch: Any
) -> Iterator[DeclaredCollective]:
    """Declares the activations and gradients that stages send in one step.

    Args:
      frame: the shard_map program around the pipeline.
      loop: the schedule's ticks, by phases.
      batch: abstract batch of one replica.
    """
    num, leaves = frame.layout.pipe, frame.activations(batch)
    size = sum(map(num_bytes, leaves))
    sends = loop.num_activation_sends, loop.num_gradient_sends
    names = "activations to the next stage", "gradients to the stage before"
    if frame.layout.tensor == 1:
        # A compiler may leave out gradients by which nothing is trained.
        bounds = False, not differentiates_layers(frame, batch)
        for count, why, bound in zip(sends, names, bounds, strict=True):
            runs, total = count * len(leaves), count * size
            yield DeclaredCollective(
                "permute", (PIPE,), num, runs, total, why, bound=bound
            )
        return
    # The model may split the activations between blocks over `tensor`, or not.
    count, why = sum(sends), f"at most: {', '.join(names)}"
    yield DeclaredCollective(
        "permute", (PIPE,), num, count, count * size, why, bound=True
    )


def declared_vocabulary(
    frame: Frame, loop: TickLoop, batch: Any
) -> Iterator[DeclaredCollective]:
    """Declares a bound on the all_reduces of embedding and head over all stages.

    Each tick of the embedding reduces x once, and once for the gradient. Each tick of
    the head reduces x, its gradient and some numbers per token.
    """
    if not frame.layout.splits_vocabulary:
        return
    ticks = loop.count_ticks
    count = ticks("forward") + 3 * ticks("head") + ticks("backward")
    size = count * frame.activation_bytes(batch)
    why = f"vocab=pipe: at most {count} activations, for embedding and head"
    yield DeclaredCollective(
        "all_reduce", (PIPE,), frame.layout.pipe, 0, size, why, bound=True
    )


def buffer_bytes(tables: Tables, traced: TracedLayer, rows: int, per_slot: int) -> int:
    """Bytes of the buffers between ticks on one device.

    Args:
      tables: the compiled schedule.
      traced: sizes of one layer.
      rows: layers of one chunk.
      per_slot: bytes that F saves for B.
    """
    # One more slot in both buffers, and the gradient that is sent next.
    activations = tables.num_inputs + tables.num_gradients + 3
    total = (tables.num_saved + 1) * per_slot + activations * traced.x
    if tables.num_states:
        total += (tables.num_states + 1) * rows * traced.deferred
    return total


def stage_bytes(frame: Frame, zero: Zero) -> tuple[int, int]:
    """Bytes of (weights, float32 sums of their gradients) on one stage.

    Both are whole over the batch axes, except for the stack under zero=3, and for
    experts, which are held.
    """
    weights = gradients = 0
    shared = frame.layered.split(frame.plan.weights)[0]
    for path, leaf in frame.plan.weights.items():
        sharded = zero.gathers_layers and path not in shared
        split = itertools.chain(*(leaf.spec if sharded else leaf.held))
        size = math.prod(leaf.shape) // frame.ways(split)
        weights += size * jnp.dtype(leaf.dtype).itemsize
        gradients += size * 4 if path in frame.plan.gradients else 0
    return weights, gradients


def backward_buffers(frame: Frame, loop: TickLoop) -> int:
    """Backward passes whose recomputed residuals have memory at the same time."""
    chip = chip_of(frame.mesh.devices.flat[0].device_kind)
    early = chip is None or chip.allocates_early
    return loop.num_backward_buffers if early else min(1, loop.num_backward_buffers)


def held(frame: Frame, zero: Zero, loop: TickLoop, saved: int, layer: int) -> Held:
    """Bytes that one stage holds all through a step.

    Args:
      frame: the shard_map program around the pipeline.
      zero: the ZeRO policy.
      loop: the schedule's ticks, by phases.
      saved: bytes saved between forward and backward passes.
      layer: whole weights of one layer, if they are gathered for it.
    """
    weights, sums = stage_bytes(frame, zero)
    return Held(
        weights=weights,
        activations=saved,
        sums=sums,
        layer=layer,
        in_ticks=True,
        head_beside_layers=loop.runs_head_beside_layers,
        scattered=_scattered(frame) if zero.splits_any else 0.0,
    )


def _scattered(frame: Frame) -> float:
    """How many times its bytes the largest shared weight takes in padded shards.

    0 if all weights are in layers.
    """
    shared = frame.layered.split(frame.plan.parameters)[0].values()
    arrays = [leaf for leaf in shared if leaf.shape]
    if not arrays:
        return 0.0
    largest = max(arrays, key=lambda leaf: math.prod(leaf.shape))
    last = largest.shape[-1] // frame.ways(largest.spec[-1])
    lanes = lanes_of(frame.mesh)
    return -(-last // lanes) * lanes / last
