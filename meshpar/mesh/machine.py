"""The machine that a plan is for: its devices, and the rates at which they work."""

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import jax

from meshpar.contracts.cost import Link
from meshpar.mesh.chips import GPU, Chip, chip_of
from meshpar.mesh.slices import slice_of

_CPU = Chip(
    "cpu",
    "cpu",
    (),
    peak_flops=2e11,
    memory_bytes=0,
    memory_bandwidth=1.6e10,
    link_bandwidth=5e9,
    num_links=1,
    torus_dims=0,
    clock_rate=2e9,
    tile=(1, 1),
    gathers_beside_compute=False,
)
"""A core of a computer, as measured on one (docs/measured_plans.md)."""

_CPU_FRESH_BANDWIDTH = 3.3e9
"""Bytes per second and core at which a system gives memory to a program, page by page,
when the program first writes to it."""

_USABLE = 0.96
"""Share of a device's memory that plans use; the runtime and gaps take the rest."""

USABLE_ON_GPUS = 0.92
"""The same for GPUs, whose libraries take memory besides. Commands give jax this share:
by itself it takes 0.75."""


NARROW_HEAD, WIDE_HEAD = 64, 128
"""Widths of heads that were measured; others are taken for the nearest."""


class Attention(NamedTuple):
    """Speed of cuDNN's attention on GPUs.

    Attributes:
      narrow: share of the peak FLOP/s that it reaches in long sequences, for heads of
        `NARROW_HEAD`.
      wide: the same for heads of `WIDE_HEAD`.
      edge: tokens by which a sequence seems longer to it.
    """

    narrow: float
    wide: float
    edge: float


ATTENTION = Attention(narrow=0.473, wide=0.607, edge=1806.0)
"""Fitted to measured steps and their profiles by `experiments.benchmarks.gpu_fit`."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices of one kind.

    Attributes:
      devices: all of them; they may be a topology.
      chip: their kind.
      memory_bytes: that a program may use on one device.
      efficiency: share of the chip's peak FLOP/s that matmuls of models reach.
      narrow: what matmuls with a dim that fills no row of a tile, such as a head_dim of
        64, take in addition, over their time at the chip's peak.
      elementwise: seconds of elementwise operations, over those of a chip like v5e with
        the same bandwidth.
      overlaps: whether transfers run beside compute.
      fresh_bandwidth: bytes per second at which a step gets memory for its temporary
        arrays; infinite where the memory is the program's all the time.
      slowdown: measured over predicted seconds of a step; 1 without measurements.
      idle: seconds in which a GPU runs no kernel, for each pass over a layer.
      attention: the speed of cuDNN's, on GPUs.
    """

    devices: tuple[jax.Device, ...]
    chip: Chip
    memory_bytes: int
    efficiency: float
    narrow: float
    elementwise: float
    overlaps: bool
    fresh_bandwidth: float = math.inf
    slowdown: float = 1.0
    idle: float = 0.0
    attention: Attention = ATTENTION

    @functools.cached_property
    def num_slices(self) -> int:
        """Slices, which slow links connect."""
        return len(set(map(slice_of, self.devices)))

    @property
    def flops(self) -> float:
        """FLOP/s of matmuls on one device."""
        return self.efficiency * self.chip.peak_flops

    def attention_flops(self, width: int, length: int) -> float:
        """FLOP/s of cuDNN's attention on one device.

        Args:
          width: of a head.
          length: tokens of a sequence.
        """
        narrow, wide = NARROW_HEAD, WIDE_HEAD
        is_narrow = abs(width - narrow) <= abs(width - wide)
        share = self.attention.narrow if is_narrow else self.attention.wide
        share *= length / (length + self.attention.edge)
        return share * self.chip.peak_flops

    @property
    def link_bandwidth(self) -> float:
        """Bytes per second that one device sends over the links of one collective."""
        return self.link().bandwidth

    def link(self, between_slices: bool = False) -> Link:
        """The links that carry a collective.

        Args:
          between_slices: whether it runs between slices, over a network.
        """
        chip = self.chip
        if between_slices:
            return Link(chip.slice_bandwidth, chip.slice_latency)
        if chip.platform == GPU:
            return Link(chip.link_bandwidth * chip.num_links, chip.link_latency)
        return Link(2 * chip.link_bandwidth, chip.link_latency, ways=2)


_EFFICIENCY = {
    "v5e": 1.0,
    "v5p": 0.85,
    "v6e": 0.6,
    "h100": 0.739,
    "h200": 0.708,
    "cpu": 1.0,
}
"""{chip: share of its peak FLOP/s that matmuls reach}; 0.7 for all others.

The peak of a CPU is what matmuls reached on one, and GPUs' are fitted to steps measured
on them (`experiments.benchmarks.gpu_fit`).
"""

_IDLE_GPU = 1e-4
"""Seconds between kernels in each pass over a layer: 3.7 to 7 ms were measured in steps
of 22 and 28 layers (docs/performance.md)."""

NARROW = {"v5e": 1.49, "v5p": 1.58, "v6e": 4.84}
"""{chip: how many times as long at its peak narrow matmuls take in addition}.

For v5e, v5p and v6e both are fitted to the cycles that their compilers state
(docs/measured_plans.md), which do not tell what else slows down real chips.
"""

ELEMENTWISE = {"v5p": 1.63, "v6e": 0.81}
"""{chip: `Machine.elementwise`}, by the same fit; 1 for other chips."""


def machine_of(
    devices: Sequence[jax.Device],
    memory: int | None = None,
    slowdown: float = 1.0,
    chip: Chip | None = None,
) -> Machine:
    """The machine that some devices make up.

    Args:
      devices: all of one kind.
      memory: bytes that a program may use on one device; by default the chip's memory
        less a share for the runtime, and for CPUs an equal part of this computer's.
      slowdown: measured over predicted seconds of a step.
      chip: for which the devices stand in; their own by default.
    """
    chip = chip or chip_of(devices[0].device_kind)
    kind = chip.platform if chip else devices[0].platform
    if chip is None:
        chip = _CPU
        memory = memory or _physical_memory() // len(devices)
    usable = USABLE_ON_GPUS if kind == GPU else _USABLE
    memory = memory or int(usable * chip.memory_bytes)
    efficiency = _EFFICIENCY.get(chip.name, 0.7)
    is_cpu = kind == _CPU.platform
    return Machine(
        tuple(devices),
        chip,
        memory,
        efficiency,
        NARROW.get(chip.name, 0.0),
        ELEMENTWISE.get(chip.name, 1.0),
        overlaps=not is_cpu,
        fresh_bandwidth=_CPU_FRESH_BANDWIDTH if is_cpu else math.inf,
        slowdown=slowdown,
        idle=_IDLE_GPU if kind == GPU else 0.0,
    )


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
