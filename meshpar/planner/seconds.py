"""Predicts the time of a step: compute by FLOPs, transfers by their contract.

A transfer beside a pass over the layers hides as long as the compute of that pass
lasts; all others are exposed. A pipeline runs in ticks: every stage waits for the
slowest, and a tick without work costs as much as one with work.
"""

import dataclasses
from typing import NamedTuple

from meshpar.contracts import cost
from meshpar.contracts.contract import DeclaredCollective
from meshpar.lowering.shard_map import ShardMapLowering
from meshpar.mesh.machine import SLOW_LINK_BANDWIDTH, Machine
from meshpar.planner.facts import Facts

_UPDATE_BYTES = 28
"""Bytes that an update of Adam reads and writes for a parameter, in float32: weight
and two moments both ways, and the gradient."""

_TENSOR_FORWARD, _TENSOR_BACKWARD = 4, 6
"""Gathers of activations over `tensor` in a layer: Megatron's two all_gathers and two
reduce_scatters each way, and two more for the gradients of weights that read them."""


class Traffic(NamedTuple):
    """What a step moves.

    Attributes:
      terms: collectives declared exactly.
      activation_bytes: of one microbatch between two layers, on one device.
      sends: activations that a stage sends.
    """

    terms: tuple[DeclaredCollective, ...]
    activation_bytes: int
    sends: int


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Predicted time of a step, by term.

    Attributes:
      layers: compute of the layers that every device would do without a pipeline.
      again: compute of layers that rematerialization repeats.
      bubble: ticks in which a stage waits, or repeats a stage.
      outside: compute of embedding and head.
      update: the optimizer.
      state: exposed transfers of weights and gradients.
      tensor: exposed transfers of activations inside layers.
      sends: transfers between stages.
      wire_bytes: bytes that one device sends in all.
    """

    layers: float
    again: float
    bubble: float
    outside: float
    update: float
    state: float
    tensor: float
    sends: float
    wire_bytes: float

    @property
    def by_term(self) -> dict[str, float]:
        """{term: seconds}."""
        terms = dataclasses.asdict(self)
        terms.pop("wire_bytes")
        return terms

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.by_term.values())


def step_seconds(
    lowering: ShardMapLowering,
    facts: Facts,
    machine: Machine,
    rows: float,
    traffic: Traffic,
) -> Seconds:
    """Predicts the time of a step.

    Args:
      lowering: of the layout.
      facts: of the model.
      machine: that it runs on.
      rows: of a microbatch on one device.
      traffic: what a step moves.
    """
    layout, layered, runner = lowering.layout, lowering.model.layered, lowering.runner
    forward = rows * facts.flops.layer / layout.tensor / machine.flops
    outside = 3 * rows * facts.flops.outside / layout.tensor / machine.flops
    repeats = 1 if layout.remat == "full" else 0
    compute: dict[str, float] = {}
    for run in runner.layer_passes:
        times = 2 + repeats if run.name == "backward" else 1
        seconds = run.runs * run.depth * times * forward
        compute[run.name] = compute.get(run.name, 0.0) + seconds
    depth = layered.depth / layout.pipe
    needed = layout.microbatches * depth * forward
    layers, again = 3 * needed, repeats * needed
    # Embedding and head of a pipeline run in ticks of their own stages.
    heads = layout.microbatches
    if layout.pipe > 1:
        heads = runner.loop.count_ticks("head")
        outside /= layout.pipe if layout.splits_vocabulary else 1
    update = sum(leaf.bytes_per_device for leaf in lowering.plan.parameters.values())
    update *= _UPDATE_BYTES / 4 / machine.chip.memory_bandwidth
    tensor, tensor_bytes = _tensor_seconds(lowering, machine, traffic)
    sends = traffic.sends * traffic.activation_bytes / layout.tensor
    slow_stages = machine.num_slices > 1 and layout.pipe % machine.num_slices == 0
    send_bandwidth = SLOW_LINK_BANDWIDTH if slow_stages else machine.link_bandwidth
    wire = sum(term.wire_bytes for term in traffic.terms) + tensor_bytes + sends
    return Seconds(
        layers=layers,
        again=again,
        bubble=max(0.0, sum(compute.values()) - layers - again),
        outside=heads * outside,
        update=update,
        state=_state_seconds(lowering, machine, traffic, compute),
        tensor=tensor,
        sends=sends / send_bandwidth,
        wire_bytes=wire,
    )


def _bandwidth(
    lowering: ShardMapLowering, machine: Machine, axes: tuple[str, ...]
) -> float:
    """Bytes per second of a collective; axes over slices take the slow links."""
    left = machine.num_slices
    for axis in lowering.layout.sizes:
        size = lowering.layout.sizes[axis]
        if left > 1 and size % left == 0:
            return SLOW_LINK_BANDWIDTH if axis in axes else machine.link_bandwidth
    return machine.link_bandwidth


def _state_seconds(
    lowering: ShardMapLowering,
    machine: Machine,
    traffic: Traffic,
    compute: dict[str, float],
) -> float:
    """Transfers of weights and gradients that outlast the compute beside them."""
    beside: dict[str, float] = {}
    for term in traffic.terms:
        seconds = term.wire_bytes / _bandwidth(lowering, machine, term.axes)
        beside[term.beside] = beside.get(term.beside, 0.0) + seconds
    exposed = beside.pop("", 0.0)
    for name, seconds in beside.items():
        hidden = compute.get(name, 0.0) if machine.overlaps else 0.0
        exposed += max(0.0, seconds - hidden)
    return exposed


def _tensor_seconds(
    lowering: ShardMapLowering, machine: Machine, traffic: Traffic
) -> tuple[float, float]:
    """(seconds, bytes) of the transfers over `tensor`, which nothing hides."""
    layout = lowering.layout
    if layout.tensor == 1:
        return 0.0, 0.0
    again = _TENSOR_FORWARD if layout.remat != "none" else 0
    gathers = 0
    for run in lowering.runner.layer_passes:
        backward = run.name == "backward"
        times = _TENSOR_BACKWARD + again if backward else _TENSOR_FORWARD
        gathers += run.runs * run.depth * times
    size = gathers * traffic.activation_bytes
    sent = cost.wire_bytes("all_gather", size, layout.tensor)
    return sent / machine.link_bandwidth, sent
