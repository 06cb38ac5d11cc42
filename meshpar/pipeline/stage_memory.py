"""Bytes that the stages of a pipeline hold."""

import itertools
import math

import jax.numpy as jnp

from meshpar.fsdp.zero import Zero
from meshpar.layouts.plan import LeafPlan, Spec
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
        # Out of step another dim is last in memory (`fsdp.memory_order`): no padding.
        padding = 0 if tables.diverges else traced.deferred_padding
        total += (tables.num_states + 1) * rows * (traced.deferred + padding)
    return total


def stage_bytes(frame: Frame, zero: Zero) -> tuple[int, int]:
    """Bytes of (weights, float32 sums of their gradients) on one stage.

    Both are whole over the batch axes, except for experts, which are held, for the
    stack's weights under zero=3, and for its gradients where ticks reduce them.
    """
    in_ticks = zero.gathers_layers, zero.reduces_early
    key = stage_bytes.__name__, in_ticks
    return frame.of_leaves(key, lambda: _stage_bytes(frame, *in_ticks))


def _stage_bytes(frame: Frame, gathers: bool, reduces: bool) -> tuple[int, int]:
    """`stage_bytes`, if ticks gather weights and reduce gradients, or not."""
    weights = gradients = 0
    shared, whole = frame.layered.split(frame.plan.weights)[0], frame.plan.parameters
    for path, leaf in frame.plan.weights.items():
        in_ticks = path not in shared
        spec = leaf.spec if in_ticks and gathers else leaf.held
        weights += _elements(frame, leaf, spec) * jnp.dtype(leaf.dtype).itemsize
        if path in frame.plan.gradients:
            spec = whole[path].spec if in_ticks and reduces else leaf.held
            gradients += 4 * _elements(frame, leaf, spec)
    return weights, gradients


def _elements(frame: Frame, leaf: LeafPlan, spec: Spec) -> int:
    """Numbers of a shard, with padding.

    Ticks keep the order of its dims. Compilers put another dim last that fills less
    than the lanes of one tile, and pad that.
    """
    size = math.prod(leaf.shape) // frame.ways(itertools.chain(*spec))
    last = leaf.shape[-1] // frame.ways(spec[-1]) if leaf.shape else 0
    lanes = lanes_of(frame.mesh)
    return size // last * -(-last // lanes) * lanes if last >= lanes else size


def backward_buffers(frame: Frame, zero: Zero, loop: TickLoop) -> int:
    """Backward passes whose recomputed residuals have memory at the same time.

    A tick outside of all loops has residuals of its own. Compilers that run gathers
    beside compute give them memory before the loop of an earlier phase begins, unless
    layers move something forward (programs of v4 to v6e, libtpu 0.0.50.1).
    """
    layout = frame.layout
    moves = max(layout.tensor, layout.context, layout.expert) > 1 or zero.gathers_layers
    chip = chip_of(frame.mesh.devices.flat[0].device_kind)
    early = (chip is None or chip.gathers_beside_compute) and not moves
    return loop.num_backward_buffers if early else min(1, loop.num_backward_buffers)


def held(frame: Frame, zero: Zero, loop: TickLoop) -> Held:
    """Bytes that one stage holds all through a step, but for activations.

    Args:
      frame: the shard_map program around the pipeline.
      zero: the ZeRO policy.
      loop: the schedule's ticks, by phases.
    """
    weights, sums = stage_bytes(frame, zero)
    return Held(
        weights=weights,
        activations=0,
        experts=frame.expert_bytes,
        sums=sums,
        in_ticks=True,
        head_beside_layers=loop.runs_head_beside_layers,
        scatters=zero.splits_any,
        runs_both_ways=loop.runs_both_ways,
    )
