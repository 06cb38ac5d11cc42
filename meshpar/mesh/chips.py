"""Accelerator chips in one table: speed, memory, links and traits of their compilers.

Figures are per jax device, which is one chip for every record.

Source: the vendors' data sheets; for the links, bandwidths and clock rates of TPUs "How
To Scale Your Model" (Austin et al., 2025), section "TPUs", which gives 15 GB/s of PCIe
per chip and 32 GB/s for v6e; PCIe of GPUs by its generation, 4 or 5, of 16 lanes;
memory and target configuration of Hopper GPUs as XLA prints them on such devices
(`xla/tools/hlo_opt/gpu_specs`); read on 2026-11-22. Between slices 6.25 GB/s per TPU
(the same book); between machines of GPUs one network card per GPU, of 400 Gb/s in a DGX
H100 or H200 and of 200 Gb/s in a DGX A100 (NVIDIA's data sheets). Latencies: of TPUs 1
microsecond per hop (the same book, section "Sharded matrices"); of NVLink and networks
those of rings with the Simple protocol in NCCL (`src/graph/tuning.cc`, read on
2026-11-28), and that of networks between slices of TPUs, too.
"""

import dataclasses
import functools
from typing import Any

TPU, GPU = "tpu", "gpu"
"""Names of the chips' platforms in jax."""

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of accelerator chip.

    Attributes:
      name: as in topology strings, such as "v5e" or "h100".
      platform: `TPU` or `GPU`.
      device_kinds: values of `jax.Device.device_kind`, exact.
      peak_flops: dense bfloat16 FLOP/s.
      float8_speed: FLOP/s in float8 over those in bfloat16.
      memory_bytes: size of the device's memory.
      memory_bandwidth: bytes per second between memory and compute.
      link_bandwidth: bytes per second over one link, one way (ICI or NVLink).
      link_latency: seconds of a message without bytes over one link.
      num_links: number of links of one chip.
      slice_bandwidth: bytes per second between slices for each chip, one way: of the
        data-center network, or of a GPU's network card (`slices`).
      slice_latency: seconds of a message without bytes between slices.
      clock_rate: cycles per second of its compute.
      host_bandwidth: bytes per second between one chip and host memory, one way (PCIe).
      torus_dims: dims of the torus that the chips form; 0 if a switch connects them.
      tile: rows and columns of a float32 tile; (1, 1) if arrays are not padded.
      gathers_beside_compute: whether the compiler overlaps an all_gather with compute.
      xla_target: target configuration in protobuf text, if the compiler needs one.
      libtpu_config: chip configuration for topologies, if the default one differs from
        real machines. By default v4 has two devices per chip; real v4s have one.
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
    clock_rate: float
    tile: tuple[int, int] = (8, 128)
    gathers_beside_compute: bool = True
    host_bandwidth: float = 15e9
    slice_bandwidth: float = 6.25e9
    link_latency: float = 1e-6
    slice_latency: float = 14e-6
    float8_speed: float = 1.0
    xla_target: str = ""
    libtpu_config: str = ""


def _gpu(name: str, kind: str, memory: int, bandwidth: float, **fields: Any) -> Chip:
    """A GPU with NVLink of 25 GB/s per link and direction, without a torus."""
    return Chip(
        name,
        GPU,
        (kind,),
        memory_bytes=memory,
        memory_bandwidth=bandwidth,
        link_bandwidth=25e9,
        link_latency=3.4e-6,
        torus_dims=0,
        tile=(1, 1),
        **fields,
    )


def _a100(name: str, kind: str, memory: int, bandwidth: float) -> Chip:
    figures = {"peak_flops": 312e12, "num_links": 12, "host_bandwidth": 32e9}
    figures |= {"slice_bandwidth": 25e9, "clock_rate": 1.41e9}
    return _gpu(name, kind, memory, bandwidth, **figures)


_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: {memory} shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{board}"
"""
"""Target configuration of a Hopper GPU, with which XLA compiles ahead of time."""


def _hopper(name: str, kind: str, memory: int, bandwidth: int) -> Chip:
    target = _HOPPER.format(board=kind, memory=memory, bandwidth=bandwidth)
    fields = {"peak_flops": 989e12, "num_links": 18, "host_bandwidth": 64e9}
    fields |= {"float8_speed": 2.0}
    fields |= {"xla_target": target, "clock_rate": 1.98e9, "slice_bandwidth": 50e9}
    return _gpu(name, kind, memory, bandwidth, **fields)


_TPUS = (
    Chip(
        "v4",
        TPU,
        ("TPU v4",),
        clock_rate=1.05e9,
        peak_flops=275e12,
        memory_bytes=32 * GIB,
        memory_bandwidth=1.2e12,
        link_bandwidth=45e9,
        num_links=6,
        torus_dims=3,
        gathers_beside_compute=False,
        libtpu_config="megacore",
    ),
    # Only v5e gathers beside compute (libtpu 0.0.51, tried on 2x2x1 to 8x8).
    Chip(
        "v5e",
        TPU,
        ("TPU v5 lite", "TPU v5e"),
        clock_rate=1.5e9,
        peak_flops=197e12,
        memory_bytes=16 * GIB,
        memory_bandwidth=8.1e11,
        link_bandwidth=45e9,
        num_links=4,
        torus_dims=2,
    ),
    Chip(
        "v5p",
        TPU,
        ("TPU v5", "TPU v5p"),
        clock_rate=1.75e9,
        peak_flops=459e12,
        memory_bytes=95 * GIB,
        memory_bandwidth=2.8e12,
        link_bandwidth=90e9,
        num_links=6,
        torus_dims=3,
        gathers_beside_compute=False,
    ),
    Chip(
        "v6e",
        TPU,
        ("TPU v6 lite", "TPU v6e"),
        host_bandwidth=32e9,
        clock_rate=1.75e9,
        peak_flops=918e12,
        memory_bytes=32 * GIB,
        memory_bandwidth=1.6e12,
        link_bandwidth=90e9,
        num_links=4,
        torus_dims=2,
        gathers_beside_compute=False,
    ),
)
_GPUS = (
    _a100("a100_40gb", "NVIDIA A100-SXM4-40GB", 40 * GIB, 1.555e12),
    _a100("a100", "NVIDIA A100-SXM4-80GB", 80 * GIB, 2.039e12),
    _hopper("h100", "NVIDIA H100 80GB HBM3", 84_929_347_584, 3_352_320_000_000),
    _hopper("h200", "NVIDIA H200", 150_754_820_096, 4_800_000_000_000),
)

CHIPS: dict[str, Chip] = {chip.name: chip for chip in (*_TPUS, *_GPUS)}
"""{name: chip}."""


@functools.cache
def chip_of(device_kind: str) -> Chip | None:
    """The chip with a `jax.Device.device_kind`; None if it is unknown, as for CPUs."""
    chips = (chip for chip in CHIPS.values() if device_kind in chip.device_kinds)
    return next(chips, None)


def peak_flops(device_kind: str) -> float | None:
    """Peak dense bfloat16 FLOP/s of a `jax.Device.device_kind`; None if unknown."""
    chip = chip_of(device_kind)
    return chip.peak_flops if chip else None
