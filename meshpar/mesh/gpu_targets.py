"""Target configurations of GPUs, with which XLA compiles ahead of time.

Source: the configurations that XLA prints on such devices
  (`xla/tools/hlo_opt/gpu_specs`).
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
device_description_str: "{board}"
"""


def hopper_target(device_kind: str, memory_bytes: int, memory_bandwidth: int) -> str:
    """The target configuration of a Hopper GPU, in protobuf text.

    Args:
      device_kind: as in `jax.Device.device_kind`.
      memory_bytes: size of the memory.
      memory_bandwidth: bytes per second.
    """
    return _HOPPER.format(
        board=device_kind, memory=memory_bytes, bandwidth=memory_bandwidth
    )
