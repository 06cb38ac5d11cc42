"""Declared collectives of a pipeline, and the bytes that its stages hold."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from meshpar.arrays import num_bytes
from meshpar.contracts.declared import DeclaredCollective
from meshpar.fsdp.zero import Zero
from meshpar.layouts.axes import PIPE, TENSOR
from meshpar.layouts.moves import Move
from meshpar.lowering.frame import Frame
from meshpar.lowering.layer_moves import Moves, Runs
from meshpar.lowering.layer_trace import TracedLayer
from meshpar.lowering.memory import Held
from meshpar.lowering.padding import lanes_of
from meshpar.lowering.trained_layers import differentiates_layers, embeds_again
from meshpar.mesh.chips import chip_of
from meshpar.pipeline.phases import TickLoop
from meshpar.schedules.ticks import Tables


class Activations(NamedTuple):
    """The activations of one microbatch between two layers.

    Attributes:
      num: their number.
      bytes: of all that one device sends at a time.
      bound: whether it may send fewer, as a compiler splits them.
      unread: whether a compiler may leave out some of their gradients.
    """

    num: int
    bytes: int
    bound: bool
    unread: bool

    @classmethod
    def of(cls, frame: Frame, batch: Any, moves: Moves) -> "Activations":
        """The activations of a program.

        Args:
          frame: the shard_map program around the pipeline.
          batch: abstract batch of one replica.
          moves: what the model moves itself.
        """
        leaves = frame.activations(batch)
        size, ways = sum(map(num_bytes, leaves)), frame.layout.tensor
        # A head need not read all of several activations.
        unread = len(leaves) > 1 or not differentiates_layers(frame, batch)

        def by_hand(moves: list[Move]) -> bool:
            return any(m.axes == (TENSOR,) and not m.bound for m in moves)

        # Layers by hand leave the length split, as the embedding does.
        split = len(leaves) == 1 and by_hand(moves.layer) and by_hand(moves.outside)
        if split and ways > 1:
            return cls(1, size // ways, False, unread)
        return cls(len(leaves), size, ways > 1, unread)

    def sends(self, num: int, ticks: int, why: str, unread: bool) -> DeclaredCollective:
        """Declares the permutes of all activations over `pipe`.

        Args:
          num: of stages.
          ticks: in which they run.
          why: their purpose.
          unread: whether a compiler may leave them out.
        """
        bound, count, size = self.bound or unread, ticks * self.num, ticks * self.bytes
        why = f"at most: {why}" if bound else why
        return DeclaredCollective(
            "permute", (PIPE,), num, count, size, why, bound=bound
        )

    def sums(self, num: int, ticks: int, why: str, unread: bool) -> DeclaredCollective:
        """Declares the all_reduces of all activations over `pipe`; args of `sends`."""
        size, may_drop = ticks * self.bytes, unread or self.num > 1
        count, why = 0 if self.bound else ticks * self.num, f"vocab=pipe: {why}"
        bound, gathers = self.bound, may_drop and not self.bound
        return DeclaredCollective(
            "all_reduce", (PIPE,), num, count, size, why, bound, gathers
        )


def declared_between(
    frame: Frame, loop: TickLoop, batch: Any, moves: Moves
) -> Iterator[DeclaredCollective]:
    """Declares sends between stages, and sums around a head that all of them share.

    A head whose vocabulary all stages split adds up, in each of its ticks, its input,
    the gradient of that, and the 1 or 0 from which the backward pass starts. The model
    moves the rest (`ops.vocabulary`).

    Args:
      frame: the shard_map program around the pipeline.
      loop: the schedule's ticks, by phases.
      batch: abstract batch of one replica.
      moves: what the model moves itself.
    """
    num, activations = frame.layout.pipe, Activations.of(frame, batch, moves)
    forward, backward = loop.num_activation_sends, loop.num_gradient_sends
    unread = activations.unread
    yield activations.sends(num, forward, "activations to the next stage", False)
    yield activations.sends(num, backward, "gradients to the stage before", unread)
    if frame.layout.splits_vocabulary:
        ticks = loop.count_ticks("head")
        yield activations.sums(num, ticks, "input of the head", False)
        yield activations.sums(num, ticks, "gradient of the input of the head", unread)
        why = "vocab=pipe: where the backward pass starts"
        yield DeclaredCollective("all_reduce", (PIPE,), num, ticks, 4 * ticks, why)


def runs_outside(frame: Frame, loop: TickLoop, batch: Any) -> Runs:
    """Runs of embedding and head in one step: those of their ticks.

    Args:
      frame: the shard_map program around the pipeline.
      loop: the schedule's ticks, by phases.
      batch: abstract batch of one replica.
    """
    forward, head, backward = map(loop.count_ticks, ("forward", "head", "backward"))
    return Runs(forward, backward, head, backward if embeds_again(frame, batch) else 0)


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
