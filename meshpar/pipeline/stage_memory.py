"""Bytes that the stages of a pipeline hold."""

import itertools
import math

import jax.numpy as jnp

from meshpar.fsdp.zero import Zero
from meshpar.lowering.frame import Frame
from meshpar.lowering.layer_trace import TracedLayer
from meshpar.lowering.memory import Held
from meshpar.lowering.padding import lanes_of
from meshpar.mesh.chips import chip_of
from meshpar.pipeline.phases import TickLoop
from meshpar.schedules.ticks import Tables


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
