"""Facts about accelerator chips: speed, memory, and what compilers need to know."""

PEAK_FLOPS: dict[str, float] = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}
"""Peak dense bfloat16 FLOP/s of one device, by the start of its `device_kind`.

Source: the vendors' data sheets (H100 and H200: SXM boards).
"""


def peak_flops(device_kind: str) -> float | None:
    """Peak bfloat16 FLOP/s of a chip, or None where it is not known (CPUs)."""
    known = [kind for kind in PEAK_FLOPS if device_kind.startswith(kind)]
    return PEAK_FLOPS[max(known, key=len)] if known else None


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
device_description_str: "{name}"
"""

TARGETS: dict[str, str] = {
    "h100": _HOPPER.format(
        bandwidth=3_352_320_000_000, memory=84_929_347_584, name="NVIDIA H100 80GB HBM3"
    ),
    "h200": _HOPPER.format(
        bandwidth=4_800_000_000_000, memory=150_754_820_096, name="NVIDIA H200"
    ),
}
"""{name: target configuration in protobuf text}."""
