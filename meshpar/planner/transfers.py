"""Predicts the time of transfers that compute does not hide."""

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from meshpar.contracts import cost
from meshpar.contracts.declared import DeclaredCollective
from meshpar.contracts.host_transfers import HostTransfer, link_seconds
from meshpar.fsdp.terms import weight_reading
from meshpar.layouts.axes import SLOW_AXES, in_use
from meshpar.layouts.layer_uses import ROWS, policies, runs
from meshpar.layouts.remat import repeated_share
from meshpar.lowering.chunked_update import state_transfers
from meshpar.lowering.layer_trace import TracedLayer
from meshpar.lowering.shard_map import ShardMapLowering
from meshpar.mesh.machine import Machine
from meshpar.mesh.platform import platform_of

_TENSOR_FORWARD, _TENSOR_BACKWARD = 4, 6
"""Gathers of activations over `tensor` in a layer: Megatron's two all_gathers and two
reduce_scatters each way, and two more for the gradients of weights that read them."""

_EXPOSED_OF_STEPS = 0.08
"""Of the time of gathers over `fsdp`, then `tensor`, what outlasts the compute beside
them; fitted to llama-1b and llama2-7b on v5e and v5p (docs/measured_plans.md)."""

_EXPOSED_OF_RINGS = 0.25
"""Of the time of transfers around rings, what outlasts the matmuls beside them; fitted
to llama2-7b on v5e (docs/measured_plans.md)."""


class Beside(NamedTuple):
    """Compute that may hide transfers.

    Attributes:
      name: of the pass over the layers.
      use: what these layers use `tensor` for.
    """

    name: str
    use: str


class Moved(NamedTuple):
    """Sums over the collectives of a step: of weights, gradients and exchanged tokens.

    Attributes:
      wire_bytes: bytes that a device sends.
      ring_sums: bytes that it sends around rings, but for what rings gather.
      seconds: {what runs beside them: (seconds, seconds without latency)}.
    """

    wire_bytes: float = 0.0
    ring_sums: int = 0
    seconds: Mapping[Beside, tuple[float, float]] = MappingProxyType({})

    @classmethod
    def of(
        cls,
        use: str,
        terms: Iterable[DeclaredCollective],
        link_of: Callable[[tuple[str, ...]], cost.Link],
    ) -> "Moved":
        """Sums over collectives.

        Args:
          use: of `tensor`, by the layers beside them.
          terms: the collectives, declared exactly.
          link_of: the links of a collective along some axes.
        """
        wire_bytes, ring_sums = 0.0, 0
        links: dict[tuple[str, ...], tuple[cost.Link, cost.Link]] = {}
        seconds: dict[Beside, tuple[float, float]] = {}
        for term in terms:
            wire_bytes += term.wire_bytes
            if term.kind == "permute" and not term.gathers:
                ring_sums += term.payload_bytes
            if term.axes not in links:
                found = link_of(term.axes)
                links[term.axes] = found, found._replace(latency=0.0)
            beside = Beside(term.beside, use)
            before = seconds.get(beside, (0.0, 0.0))
            own = map(term.seconds, links[term.axes])
            seconds[beside] = tuple(map(operator.add, before, own))
        return cls(wire_bytes, ring_sums, seconds)

    def plus(self, other: "Moved") -> "Moved":
        """The sums over the collectives of both."""
        seconds = dict(self.seconds)
        for beside, own in other.seconds.items():
            before = seconds.get(beside, (0.0, 0.0))
            seconds[beside] = tuple(map(operator.add, before, own))
        wire_bytes = self.wire_bytes + other.wire_bytes
        return Moved(wire_bytes, self.ring_sums + other.ring_sums, seconds)


class Traffic(NamedTuple):
    """The transfers of a step.

    Attributes:
      moved: by collectives that are declared exactly.
      host: transfers between device and host memory.
      activation_bytes: of one microbatch between two layers, on one device.
      sends: activations that a stage sends.
    """

    moved: Moved
    host: tuple[HostTransfer, ...]
    activation_bytes: int
    sends: int


class Exposed(NamedTuple):
    """Seconds of transfers that compute does not hide.

    Attributes:
      of_bytes: that their bytes take.
      latency: that their messages take in addition.
    """

    of_bytes: float
    latency: float

    def times(self, factor: float) -> "Exposed":
        """All seconds, multiplied."""
        return Exposed(factor * self.of_bytes, factor * self.latency)

    def plus(self, other: "Exposed") -> "Exposed":
        """The sum of both."""
        return Exposed(self.of_bytes + other.of_bytes, self.latency + other.latency)


def link(
    lowering: ShardMapLowering, machine: Machine, axes: tuple[str, ...]
) -> cost.Link:
    """The links of a collective: those of a slice, or those between slices."""
    left = machine.num_slices
    if left == 1:
        return machine.link()
    for axis in in_use(SLOW_AXES, lowering.layout.sizes):
        across = math.gcd(lowering.layout.sizes[axis], left)
        if across > 1 and axis in axes:
            return machine.link(between_slices=True)
        left //= across
    return machine.link()


def state_seconds(
    machine: Machine, moved: Moved, compute: Mapping[Beside, float]
) -> Exposed:
    """Transfers of weights and gradients, as far as compute does not hide them."""
    exposed = [0.0, 0.0]
    for beside, lasts in moved.seconds.items():
        hidden = compute.get(beside, 0.0) if machine.overlaps else 0.0
        for i, seconds in enumerate(lasts):
            least = _EXPOSED_OF_STEPS * seconds if beside.use == ROWS else 0.0
            exposed[i] += max(least, seconds - hidden)
    whole, of_bytes = exposed
    return Exposed(of_bytes, whole - of_bytes)


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
    lowering: ShardMapLowering, machine: Machine, traffic: Traffic, traced: TracedLayer
) -> tuple[Exposed, float]:
    """Transfers over `tensor`: (as far as matmuls do not hide them, bytes).

    Rings of TPUs run beside matmuls. All else is exposed, as are changes between layers
    that split rows and layers that split features.
    """
    layout, links = lowering.layout, machine.link()
    if layout.tensor == 1:
        return Exposed(0.0, 0.0), 0.0
    gathers = _gathers(lowering)
    size = gathers * traffic.activation_bytes
    inside = _sent("all_gather", size, layout.tensor, links, gathers)
    rings = platform_of(lowering.mesh).hides_ring_steps
    inside = inside.times(_EXPOSED_OF_RINGS if rings else 1.0)
    stack = runs(layout.layers, layout.remat, lowering.model.layered.depth)
    # And gradients back.
    changes = 2 * sum(run.num_changes for run in stack) * layout.microbatches
    rows = changes * traced.x
    between = _sent("all_to_all", rows, layout.tensor, links, changes)
    sent = cost.wire_bytes("all_gather", size, layout.tensor)
    sent += cost.wire_bytes("all_to_all", rows, layout.tensor)
    return inside.plus(between), sent


def _gathers(lowering: ShardMapLowering) -> int:
    """Gathers over `tensor` in layers that split their features, in one step."""
    layout = lowering.layout
    own = policies(layout.layers, layout.remat, lowering.model.layered.depth)
    split = sum(count for _, count in own)
    repeated = sum(count * repeated_share(policy, 1) for policy, count in own)
    again = _TENSOR_FORWARD * repeated / split if split else 0
    gathers = 0
    for run in weight_reading(lowering.runner.layer_passes):
        backward = run.name == "backward"
        times = _TENSOR_BACKWARD + again if backward else _TENSOR_FORWARD
        gathers += run.runs * run.depth * times
    return gathers


def _sent(kind: str, size: float, n: int, links: cost.Link, count: float) -> Exposed:
    """All seconds of collectives, as `cost.seconds`."""
    of_bytes = cost.seconds(kind, size, n, links._replace(latency=0.0))
    return Exposed(of_bytes, cost.seconds(kind, size, n, links, count) - of_bytes)
