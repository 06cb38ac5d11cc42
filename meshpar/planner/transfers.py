"""Predicts the time of transfers that compute does not hide."""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from meshpar.contracts import cost
from meshpar.contracts.declared import DeclaredCollective
from meshpar.contracts.host_transfers import HostTransfer, link_seconds
from meshpar.layouts.axes import SLOW_AXES, in_use
from meshpar.layouts.layer_uses import ROWS, policies, runs
from meshpar.layouts.remat import repeated_share
from meshpar.lowering.chunked_update import state_transfers
from meshpar.lowering.layer_trace import TracedLayer
from meshpar.lowering.shard_map import ShardMapLowering
from meshpar.mesh.machine import Machine

_TENSOR_FORWARD, _TENSOR_BACKWARD = 4, 6
"""Gathers of activations over `tensor` in a layer: Megatron's two all_gathers and two
reduce_scatters each way, and two more for the gradients of weights that read them."""

_EXPOSED_OF_STEPS = 0.08
"""Of the time of gathers over `fsdp`, then `tensor`, what outlasts the compute beside
them; fitted to llama-1b and llama2-7b on v5e and v5p (docs/measured_plans.md)."""


class Traffic(NamedTuple):
    """The transfers of a step.

    Attributes:
      terms: {use of `tensor`: collectives declared exactly} of layers of this use; of
        all else with those that split features.
      host: transfers between device and host memory.
      activation_bytes: of one microbatch between two layers, on one device.
      sends: activations that a stage sends.
    """

    terms: Mapping[str, tuple[DeclaredCollective, ...]]
    host: tuple[HostTransfer, ...]
    activation_bytes: int
    sends: int

    @property
    def all_terms(self) -> Iterator[DeclaredCollective]:
        """The terms of all uses."""
        return itertools.chain(*self.terms.values())


class Beside(NamedTuple):
    """Compute that may hide transfers.

    Attributes:
      name: of the pass over the layers.
      use: what these layers use `tensor` for.
    """

    name: str
    use: str


def bandwidth(
    lowering: ShardMapLowering, machine: Machine, axes: tuple[str, ...]
) -> float:
    """Bytes per second of a collective, over links of a slice or between slices."""
    left = machine.num_slices
    if left == 1:
        return machine.link_bandwidth
    for axis in in_use(SLOW_AXES, lowering.layout.sizes):
        across = math.gcd(lowering.layout.sizes[axis], left)
        if across > 1 and axis in axes:
            return machine.chip.slice_bandwidth
        left //= across
    return machine.link_bandwidth


def state_seconds(
    lowering: ShardMapLowering,
    machine: Machine,
    traffic: Traffic,
    compute: Mapping[Beside, float],
) -> float:
    """Seconds of transfers of weights and gradients that compute does not hide."""
    lasts: dict[Beside, float] = {}
    for use, terms in traffic.terms.items():
        for term in terms:
            seconds = term.wire_bytes / bandwidth(lowering, machine, term.axes)
            beside = Beside(term.beside, use)
            lasts[beside] = lasts.get(beside, 0.0) + seconds
    exposed = 0.0
    for beside, seconds in lasts.items():
        hidden = compute.get(beside, 0.0) if machine.overlaps else 0.0
        least = _EXPOSED_OF_STEPS * seconds if beside.use == ROWS else 0.0
        exposed += max(least, seconds - hidden)
    return exposed


def host_seconds(
    lowering: ShardMapLowering,
    machine: Machine,
    traffic: Traffic,
    compute: Mapping[Beside, float],
) -> float:
    """Seconds of transfers to and from the host that compute does not hide.

    Those of the update have only the update beside them, which is short; all others
    follow the layers.
    """
    update = set(state_transfers(lowering.plan))
    beside = [transfer for transfer in traffic.host if transfer not in update]
    rate = machine.chip.host_bandwidth
    hidden = sum(compute.values()) if machine.overlaps else 0.0
    exposed = max(0.0, link_seconds(beside, rate) - hidden)
    return link_seconds(update, rate) + exposed


def tensor_seconds(
    lowering: ShardMapLowering, machine: Machine, traffic: Traffic
) -> tuple[float, float]:
    """(seconds, bytes) of the transfers over `tensor`, if nothing hides them.

    Of layers that split their features.
    """
    layout = lowering.layout
    if layout.tensor == 1:
        return 0.0, 0.0
    own = policies(layout.layers, layout.remat, lowering.model.layered.depth)
    split = sum(count for _, count in own)
    repeated = sum(count * repeated_share(policy, 1) for policy, count in own)
    again = _TENSOR_FORWARD * repeated / split if split else 0
    gathers = 0
    for run in lowering.runner.layer_passes:
        backward = run.name == "backward"
        times = _TENSOR_BACKWARD + again if backward else _TENSOR_FORWARD
        gathers += run.runs * run.depth * times
    size = gathers * traffic.activation_bytes
    sent = cost.wire_bytes("all_gather", size, layout.tensor)
    return sent / machine.link_bandwidth, sent


def exchange_bytes(lowering: ShardMapLowering, traced: TracedLayer) -> float:
    """Bytes sent where activations change between split rows and split features."""
    layout = lowering.layout
    stack = runs(layout.layers, layout.remat, lowering.model.layered.depth)
    changes = sum(run.num_changes for run in stack)
    size = 2 * changes * layout.microbatches * traced.x  # And gradients back.
    return cost.wire_bytes("all_to_all", size, layout.tensor)
