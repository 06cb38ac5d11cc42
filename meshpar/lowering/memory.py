"""Predicts the memory of a training step on one device, by kind, without compiling.

State is exact (it is the plan's). Activations come from tracing one layer
(`layer_trace`): the bytes that it saves for the backward pass, times the depth, and a
share of those that it holds while it runs.
"""

import dataclasses
from typing import NamedTuple

from meshpar.lowering.layer_trace import TracedLayer


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
        return sum(vars(self).values()) - self.host

    @property
    def temporary(self) -> int:
        """Bytes of the total that every step takes anew."""
        return self.weights + self.gradients + self.activations + self.working


_RUNNING, _RUNNING_IN_TICKS, _RUNNING_UNROLLED = 0.5, 0.4, 0.25
"""Shares of what a layer holds while it runs backward that are in memory at once: of
layers in a loop, of those in the ticks of a pipeline, and of layers without a loop."""

_GATHERED, _GATHERED_BY_HEAD = 3.5, 4.0
"""Whole activations beside them (`layer_trace.held_at_times`), and in a tick's head."""

_WHOLE_HEAD = 3.0
"""Copies of a head's weight beside all that, where `tensor` does not split it."""

_LAYER, _LAYER_OVER_ROWS, _LAYER_IN_TICKS = 1.7, 2.3, 3.7
"""Copies of a layer's weights that are gathered for it: whole, and as a gradient. Where
they are gathered over `tensor` too, each weight comes in two steps; ticks add gradients
to float32 sums."""

_EXPERTS_IN_TICKS, _GATHERED_EXPERTS = 1.3, 2.2
"""Copies of a layer's experts, as slices of a stage's or gathered for the layer:
kernels read matrices by rows, and by columns for the gradient of the rows."""

_HEAD, _HEAD_IN_TICKS = 3.4, 2.0
"""The head's phase: copies of its weight, in the compute dtype, that its gradient and
its sums in float32 take."""

_HEAD_UNROLLED = 1.0
"""Copies of the head's weight beside the first layer that runs backward without a loop:
its gradient."""

_SCATTERED = 3.5
"""Copies of the gradients of embedding and head while a pipeline scatters them.

All are fitted to the peaks of compiled programs (docs/measured_plans.md).
"""


class Held(NamedTuple):
    """Bytes that a program holds all through the passes of a step, on one device.

    Attributes:
      weights: copies in the compute dtype.
      activations: saved between forward and backward passes.
      gradients: of the backward pass.
      sums: float32 sums of gradients over microbatches or ticks.
      gathered: an activation between two layers, whole, if a layer gathers it.
      layer: whole weights of one layer, if they are gathered for it.
      over_rows: whether they are gathered over `tensor` too.
      logits: copies of the logits of a block of the loss, in memory.
      chunk: the largest part of what lives in host memory that is on the device at a
        time.
      gathers_head: whether the head's weight is gathered for it, beside `weights`.
      whole_head: whether `tensor` splits layers, and not the head's weight.
      experts: weights of the experts of one layer, if ticks copy them for kernels.
      loops: whether layers run in a loop.
      repeats: whether layers are computed again in the backward pass.
      in_ticks: whether gradients are added up from tick to tick.
      head_beside_layers: whether ticks run the head and layers backward.
      scatters: whether gradients of embedding and head are scattered after all ticks.
      runs_both_ways: whether ticks run layers forward and backward.
      matrices: of the update of one device's whole matrices, after all passes.
    """

    weights: int
    activations: int
    gradients: int = 0
    sums: int = 0
    gathered: int = 0
    layer: int = 0
    over_rows: bool = False
    logits: int = 0
    chunk: int = 0
    gathers_head: bool = False
    whole_head: bool = False
    experts: int = 0
    loops: bool = True
    repeats: bool = True
    in_ticks: bool = False
    head_beside_layers: bool = False
    scatters: bool = False
    runs_both_ways: bool = False
    matrices: int = 0


def predicted_memory(
    state: dict[str, int], traced: TracedLayer, held: Held, host: int = 0
) -> Memory:
    """The peak of one step.

    Args:
      state: bytes of the training state in one device's memory, by kind.
      traced: of one layer.
      held: of the whole step.
      host: bytes in host memory.
    """
    if held.in_ticks:
        layer = _RUNNING_IN_TICKS * traced.running
        if held.head_beside_layers:
            layer += _HEAD_IN_TICKS * traced.largest
            layer += _GATHERED_BY_HEAD * held.gathered
        shared = traced.largest * (1 if traced.tied else 2)  # Embedding and head.
        head = _SCATTERED * shared if held.scatters else 0.0
        if not held.runs_both_ways:  # What was saved is read by then.
            head -= held.activations
        if held.layer:
            # What ticks gather has memory before the loop of ticks begins.
            gathered = _LAYER_IN_TICKS * (held.layer - held.experts)
            gathered += _GATHERED_EXPERTS * held.experts
            layer, head = layer + gathered, head + gathered
        else:
            layer += _EXPERTS_IN_TICKS * held.experts
        head = max(head, traced.largest)
    else:
        copies = _LAYER_OVER_ROWS if held.over_rows else _LAYER
        layer = copies * held.layer
        if held.loops:
            layer += _RUNNING * traced.running
        else:
            # The copies of the stack's weights are there in place of its gradients,
            # which are as large, and come later.
            running = _RUNNING_UNROLLED * traced.running if held.repeats else 0
            layer += max(running, held.logits + traced.x)
            layer += _HEAD_UNROLLED * traced.largest
        # The gradients of the layers are not there yet, and nearly all in the layers.
        head = (_HEAD + held.gathers_head) * traced.largest - held.gradients
        # Its input and the gradient of that, whole where devices split them.
        head += held.logits + traced.x + held.gathered
        if held.gathers_head:  # The embedding's gradient is added before a scatter.
            layer += traced.tied
    layer += _GATHERED * held.gathered + traced.grouped + traced.grouped_whole
    whole_head = int(_WHOLE_HEAD * traced.largest) if held.whole_head else 0
    update = held.matrices - held.activations  # Those are read by then.
    return Memory(
        parameters=state["parameters"],
        optimizer=state["optimizer"],
        weights=held.weights,
        gradients=held.gradients + held.sums,
        activations=held.activations,
        working=int(max(max(layer, head, held.chunk) + whole_head, update)),
        synchronization=state["synchronization"],
        host=host,
    )
