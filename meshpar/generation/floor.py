"""The floor of decoding: the least time to read what one token needs."""

from typing import NamedTuple

import jax

from meshpar.contracts.host_transfers import link_seconds
from meshpar.generation.programs import GenerationPrograms
from meshpar.layouts.plan import HOST_MEMORY
from meshpar.lowering.inspection import bytes_per_device
from meshpar.mesh.chips import chip_of


class Floor(NamedTuple):
    """The least time of one decoded token of every sequence.

    Attributes:
      seconds: time.
      why: what takes it.
    """

    seconds: float
    why: str


def floor(programs: GenerationPrograms) -> Floor | None:
    """The floor of decoding; None for a chip that is not known.

    All weights and the whole cache are read from the device's memory, and the weights
    that live in host memory come over the link.

    Args:
      programs: of a generator.
    """
    chip = chip_of(programs.mesh.devices.flat[0].device_kind)
    if chip is None:
        return None
    arrays = programs.abstract_params, programs.abstract_cache
    size = bytes_per_device(arrays, jax.tree.map(lambda x: x.sharding, arrays))
    streaming = link_seconds(programs.host, chip.host_bandwidth)
    return max(
        Floor(size / chip.memory_bandwidth, "read weights and cache"),
        Floor(streaming, "bring weights from host memory"),
    )


def resident_bytes(programs: GenerationPrograms) -> int:
    """Bytes of one device's memory that weights and cache fill between two tokens."""
    weights = {
        path: x
        for path, x in programs.abstract_params.items()
        if x.sharding.memory_kind != HOST_MEMORY
    }
    arrays = weights, programs.abstract_cache
    return bytes_per_device(arrays, jax.tree.map(lambda x: x.sharding, arrays))
