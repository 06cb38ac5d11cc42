"""Accelerator chips in one table: speed, memory, links and what their compilers do.

Figures are per chip as jax sees it (one device) and dense bfloat16.

Source: the vendors' data sheets, and for links "How To Scale Your Model" (Austin et
al., 2025), section "TPUs"; read on 2026-11-22.
"""

import dataclasses

from meshpar.mesh.gpu_targets import hopper_target

TPU, GPU = "tpu", "gpu"
"""Platforms of the chips, as jax names them."""

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of accelerator chip.

    Attributes:
      name: as in topology strings, such as "v5e" or "h100".
      platform: `TPU` or `GPU`.
      device_kinds: how `jax.Device.device_kind` begins; the longest match counts.
      peak_flops: dense bfloat16 FLOP/s.
      memory_bytes: size of the device's memory.
      memory_bandwidth: bytes per second.
      link_bandwidth: bytes per second over one link, one way (ICI or NVLink).
      num_links: links of one chip.
      torus_dims: dims of the torus that the chips form; 0 behind a switch.
      tile: rows and columns of a float32 tile; (1, 1) where nothing is padded.
      gathers_beside_compute: whether the compiler runs an all_gather beside compute.
      xla_target: target configuration in protobuf text, where the compiler wants one.
    """

    name: str
    platform: str
    device_kinds: tuple[str, ...]
    peak_flops: float
    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float
    num_links: int
    torus_dims: int
    tile: tuple[int, int] = (8, 128)
    gathers_beside_compute: bool = True
    xla_target: str = ""


def _tpu(name: str, *device_kinds: str, **facts: object) -> Chip:
    return Chip(name, TPU, device_kinds, **facts)


def _hopper(name: str, kind: str, board: str, memory: int, bandwidth: int) -> Chip:
    return Chip(
        name,
        GPU,
        (kind,),
        peak_flops=989e12,
        memory_bytes=memory,
        memory_bandwidth=bandwidth,
        link_bandwidth=25e9,
        num_links=18,
        torus_dims=0,
        tile=(1, 1),
        xla_target=hopper_target(board, memory, bandwidth),
    )


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _tpu(
            *("v4", "TPU v4"),
            peak_flops=275e12,
            memory_bytes=32 * GIB,
            memory_bandwidth=1.2e12,
            link_bandwidth=45e9,
            num_links=6,
            torus_dims=3,
            gathers_beside_compute=False,
        ),
        # Only v5e gathers beside compute (libtpu 0.0.51, tried on 2x2x1 to 8x8).
        _tpu(
            *("v5e", "TPU v5 lite", "TPU v5e"),
            peak_flops=197e12,
            memory_bytes=16 * GIB,
            memory_bandwidth=8.1e11,
            link_bandwidth=45e9,
            num_links=4,
            torus_dims=2,
        ),
        _tpu(
            *("v5p", "TPU v5", "TPU v5p"),
            peak_flops=459e12,
            memory_bytes=95 * GIB,
            memory_bandwidth=2.8e12,
            link_bandwidth=90e9,
            num_links=6,
            torus_dims=3,
            gathers_beside_compute=False,
        ),
        _tpu(
            *("v6e", "TPU v6 lite", "TPU v6e"),
            peak_flops=918e12,
            memory_bytes=32 * GIB,
            memory_bandwidth=1.6e12,
            link_bandwidth=90e9,
            num_links=4,
            torus_dims=2,
            gathers_beside_compute=False,
        ),
        Chip(
            "a100",
            GPU,
            ("NVIDIA A100",),
            peak_flops=312e12,
            memory_bytes=80 * 10**9,
            memory_bandwidth=2.039e12,
            link_bandwidth=25e9,
            num_links=12,
            torus_dims=0,
            tile=(1, 1),
        ),
        _hopper(
            *("h100", "NVIDIA H100", "NVIDIA H100 80GB HBM3"),
            memory=84_929_347_584,
            bandwidth=3_352_320_000_000,
        ),
        _hopper(
            *("h200", "NVIDIA H200", "NVIDIA H200"),
            memory=150_754_820_096,
            bandwidth=4_800_000_000_000,
        ),
    )
}
"""{name: chip}."""


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a `jax.Device.device_kind`; None where it is not known (CPUs)."""
    matches = [
        (len(start), chip)
        for chip in CHIPS.values()
        for start in chip.device_kinds
        if device_kind.startswith(start)
    ]
    return max(matches, key=lambda match: match[0])[1] if matches else None


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a chip, or None where it is not known (CPUs)."""
    chip = chip_of(device_kind)
    return chip.peak_flops if chip else None
