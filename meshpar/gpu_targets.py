"""GPUs to compile for ahead of time, as XLA's target configurations (no jax).

Source: what XLA prints for such a device (`xla/tools/hlo_opt/gpu_specs`), and the
vendor's data sheets for memory size and bandwidth.
"""

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
