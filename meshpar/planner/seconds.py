"""Predicts the time of a step: compute by FLOPs, transfers by their contract.

A transfer beside a pass over the layers hides as long as the compute of that pass
lasts; all others are exposed. A pipeline runs in ticks: every stage waits for the
slowest, and a tick without work costs as much as one with work.
"""

import dataclasses
import math
from typing import NamedTuple

from meshpar.contracts import cost
from meshpar.contracts.declared import DeclaredCollective
from meshpar.contracts.host_transfers import HostTransfer, link_seconds
from meshpar.layouts.axes import PIPE, SLOW_AXES, in_use
from meshpar.layouts.layout import Layout
from meshpar.layouts.mixes import average
from meshpar.layouts.remat import NONE, repeated_share
from meshpar.lowering.chunked_update import state_transfers
from meshpar.lowering.layer_trace import TracedLayer, logits_ways
from meshpar.lowering.shard_map import ShardMapLowering
from meshpar.mesh.machine import Machine
from meshpar.mesh.platform import platform_of
from meshpar.planner.facts import Facts

_UPDATE_BYTES = 32
"""Bytes that an update of Adam reads and writes for a parameter, in float32: weight
and two moments both ways, and the gradient, which is clipped."""

_HELD, _SAVED, _VOCABULARY, _STATE_MOVES, _TENSOR_MOVES = 1.7, 2.5, 52.0, 2.3, 5.2
"""Bytes that a pass moves between a chip and its memory: for each byte that a layer
holds, for each that it saves, and in the head for each byte of its weight, of which
float32 copies and a gradient are written and read block by block; for each byte of
weights and gradients, and of activations over `tensor`, that the device sends, which is
sliced, copied and added to. All are fitted to the cycles that compilers state
(docs/planning.md)."""

_TENSOR_FORWARD, _TENSOR_BACKWARD = 4, 6
"""Gathers of activations over `tensor` in a layer: Megatron's two all_gathers and two
reduce_scatters each way, and two more for the gradients of weights that read them."""

_EXPOSED_OF_RINGS = 0.25
"""Of the time of transfers around rings, what outlasts the matmuls beside them; fitted
to llama2-7b on v5e (docs/planning.md)."""


class Traffic(NamedTuple):
    """What a step moves.

    Attributes:
      terms: collectives declared exactly.
      host: transfers between device and host memory.
      activation_bytes: of one microbatch between two layers, on one device.
      sends: activations that a stage sends.
    """

    terms: tuple[DeclaredCollective, ...]
    host: tuple[HostTransfer, ...]
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
      saved: activations on their way to memory and back.
      moves: slices, copies and additions of what devices send.
      state: exposed transfers of weights and gradients.
      tensor: exposed transfers of activations inside layers.
      sends: transfers between stages.
      host: exposed transfers between device and host memory.
      wire_bytes: bytes that one device sends in all.
      kernels: part of the total that kernels written by hand take; estimates of
        compiled programs leave them out.
    """

    layers: float
    again: float
    bubble: float
    outside: float
    update: float
    saved: float
    moves: float
    state: float
    tensor: float
    sends: float
    host: float
    wire_bytes: float
    kernels: float

    def slower(self, times: float) -> "Seconds":
        """All terms so many times as long; the bytes stay."""
        terms = {name: times * value for name, value in self.by_term.items()}
        return dataclasses.replace(self, kernels=times * self.kernels, **terms)

    @property
    def by_term(self) -> dict[str, float]:
        """{term: seconds}."""
        terms = dataclasses.asdict(self)
        del terms["wire_bytes"], terms["kernels"]
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
    traced: TracedLayer,
    traffic: Traffic,
) -> Seconds:
    """Predicts the time of a step.

    Args:
      lowering: of the layout.
      facts: of the model.
      machine: that it runs on.
      rows: of a microbatch on one device.
      traced: bytes of one layer and of the head on one device.
      traffic: what a step moves.
    """
    layout, runner = lowering.layout, lowering.runner
    layer = _layer_seconds(layout, facts, machine, rows)
    compute: dict[str, float] = {}
    passes, in_kernels = 0, 0.0
    for run in runner.layer_passes:
        times = run.runs * run.depth
        seconds, kernels = layer.of(run.name)
        compute[run.name] = compute.get(run.name, 0.0) + times * seconds
        in_kernels += times * kernels
        passes += times
    needed = layout.microbatches * lowering.model.layered.depth / layout.pipe
    # Stages that save their inputs run forward once more.
    stages_again = layer.forward if "forward again" in compute else 0.0
    layers, again = 3 * needed * layer.forward, needed * (layer.again + stages_again)
    # Embedding and head of a pipeline run in ticks of their own stages.
    heads = layout.microbatches
    # Each device computes all logits of its rows if nothing splits the vocabulary.
    ways = logits_ways(facts.layered, lowering.plan)
    outside = rows / ways * facts.flops.outside / machine.flops
    if layout.pipe > 1:
        heads = runner.loop.count_ticks("head")
        outside /= layout.pipe if layout.splits_vocabulary else 1
    memory_bandwidth = machine.chip.memory_bandwidth
    # Then those are the logits of so many times as many tokens.
    times_tokens = layout.tensor / ways
    outside += _VOCABULARY * times_tokens * traced.largest / memory_bandwidth
    update = sum(leaf.bytes_per_device for leaf in lowering.plan.parameters.values())
    update *= _UPDATE_BYTES / 4
    sent, tensor_bytes = _tensor_seconds(lowering, machine, traffic)
    rings = platform_of(lowering.mesh).hides_ring_steps
    state_bytes = sum(term.wire_bytes for term in traffic.terms)
    moves = _STATE_MOVES * state_bytes + _TENSOR_MOVES * tensor_bytes
    sends = traffic.sends * traffic.activation_bytes / layout.tensor
    return Seconds(
        layers=layers,
        again=again,
        bubble=max(0.0, sum(compute.values()) - layers - again),
        outside=heads * outside,
        update=update / memory_bandwidth,
        saved=_SAVED * passes * traced.saved / memory_bandwidth,
        moves=moves / memory_bandwidth,
        state=_state_seconds(lowering, machine, traffic, compute),
        tensor=sent * _EXPOSED_OF_RINGS if rings else sent,
        sends=sends / _bandwidth(lowering, machine, (PIPE,)),
        host=_host_seconds(lowering, machine, traffic, compute),
        wire_bytes=state_bytes + tensor_bytes + sends,
        kernels=in_kernels,
    )


class _LayerSeconds(NamedTuple):
    """Compute of one layer on one device.

    Attributes:
      forward: of its forward pass.
      kernels: the part of that in kernels written by hand.
      again: that its backward pass repeats.
      kernels_again: the part of that in kernels.
    """

    forward: float
    kernels: float
    again: float
    kernels_again: float

    def of(self, name: str) -> tuple[float, float]:
        """(all, in kernels) of a pass by its name."""
        if name != "backward":
            return self.forward, self.kernels
        all_seconds = 2 * self.forward + self.again
        return all_seconds, 2 * self.kernels + self.kernels_again


def _layer_seconds(
    layout: Layout, facts: Facts, machine: Machine, rows: float
) -> _LayerSeconds:
    """The compute of one layer with some rows."""
    # What a layer holds is what its elementwise operations make.
    held = facts.layer(layout, rows, layout.tensor).running
    elementwise = _HELD * held / machine.chip.memory_bandwidth
    row_seconds = rows / layout.tensor / machine.flops
    kernels = row_seconds * facts.flops.kernels
    forward = row_seconds * facts.flops.layer + kernels + elementwise
    narrow = rows / layout.tensor * facts.flops.narrow / machine.chip.peak_flops
    forward += machine.narrow * narrow
    # A policy that keeps the results of matmuls does not keep those of kernels.
    kinds = {NONE: 0.0, "dots": kernels + elementwise}
    policies = layout.remat, facts.layered.depth
    again = average(*policies, lambda policy: kinds.get(policy, forward))
    kernels_again = repeated_share(*policies) * kernels
    return _LayerSeconds(forward, kernels, again, kernels_again)


def _bandwidth(
    lowering: ShardMapLowering, machine: Machine, axes: tuple[str, ...]
) -> float:
    """Bytes per second of a collective; axes over slices take the slow links."""
    left = machine.num_slices
    if left == 1:
        return machine.link_bandwidth
    for axis in in_use(SLOW_AXES, lowering.layout.sizes):
        across = math.gcd(lowering.layout.sizes[axis], left)
        if across > 1 and axis in axes:
            return machine.chip.slice_bandwidth
        left //= across
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


def _host_seconds(
    lowering: ShardMapLowering,
    machine: Machine,
    traffic: Traffic,
    compute: dict[str, float],
) -> float:
    """Transfers to and from the host that outlast the compute beside them.

    Those of the update have only the update beside them, which is short; all others
    follow the layers.
    """
    update = set(state_transfers(lowering.plan))
    beside = [transfer for transfer in traffic.host if transfer not in update]
    bandwidth = machine.chip.host_bandwidth
    hidden = sum(compute.values()) if machine.overlaps else 0.0
    exposed = max(0.0, link_seconds(beside, bandwidth) - hidden)
    return link_seconds(update, bandwidth) + exposed


def _tensor_seconds(
    lowering: ShardMapLowering, machine: Machine, traffic: Traffic
) -> tuple[float, float]:
    """(seconds, bytes) of the transfers over `tensor`, if nothing hides them."""
    layout = lowering.layout
    if layout.tensor == 1:
        return 0.0, 0.0
    depth = lowering.model.layered.depth
    again = _TENSOR_FORWARD * repeated_share(layout.remat, depth)
    gathers = 0
    for run in lowering.runner.layer_passes:
        backward = run.name == "backward"
        times = _TENSOR_BACKWARD + again if backward else _TENSOR_FORWARD
        gathers += run.runs * run.depth * times
    size = gathers * traffic.activation_bytes
    sent = cost.wire_bytes("all_gather", size, layout.tensor)
    return sent / machine.link_bandwidth, sent
