"""Facts about a GPU: its limits, and the time of the kernels of a step."""

import collections
import glob
import re
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks.gpu_cases import emit, times_of_a_step
from meshpar.mesh.platform import GPU, platform_named

ATTENTION, MATMUL, COPY, OTHER, IDLE = "attention matmul copy other idle".split()
_CLASSES = {
    ATTENTION: "cudnn|fmha|flash|sdpa",
    MATMUL: "gemm|nvjet|cublas|xmma|cutlass|sm90|dot",
    COPY: "copy|transpose|memcpy|concatenate|dynamic.update|memset",
}
"""{class: regex of the names of kernels, in lower case}; the first match counts."""
_PROFILED = 2
_QUERY = "driver_version,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
_SIDE = 8192
"""Side of the matrices whose product is timed."""


def run_device(rehearsal: bool) -> None:
    """Prints the name of the GPU, and its speed of matmuls and copies.

    The row has the driver, clocks in MHz and power in W during the product of matrices
    in bfloat16, TFLOP/s of that product, and TB/s that a copy reads and
    writes.
    """
    device = jax.devices()[0]
    side = _SIDE // 32 if rehearsal else _SIDE
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (side, side), jnp.bfloat16) for key in keys)
    product = jax.jit(jnp.matmul)

    def products() -> Any:
        y = a
        for _ in range(20):
            y = product(y, b)
        return y

    seconds = times_of_a_step(products, jax.block_until_ready).median / 20
    card = card_under(products)
    x, copy = jnp.ones(side**2 * 8), jax.jit(lambda x: x + 1)
    copies = times_of_a_step(lambda: copy(x), jax.block_until_ready).median
    emit(
        program="device",
        case=device.device_kind,
        status="ok",
        jax=jax.__version__,
        limit_gb=(device.memory_stats() or {}).get("bytes_limit", 0) / 1e9,
        matmul_tflops=2 * side**3 / seconds / 1e12,
        copy_tb_s=2 * x.nbytes / copies / 1e12,
        **card,
    )


def card_under(step: Callable[[], Any]) -> dict[str, str]:
    """Facts about the card by `nvidia-smi` while steps run; {} without a GPU.

    Args:
      step: starts one.
    """
    if platform_named(jax.devices()[0].platform) is not GPU:
        return {}
    for _ in range(_PROFILED):
        result = step()
    card = _nvidia_smi()
    jax.block_until_ready(result)
    return card


def _nvidia_smi() -> dict[str, str]:
    """Facts about the card by `nvidia-smi`; none where it does not answer."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return dict(zip(_QUERY.split(","), text.stdout.strip().split(", "), strict=False))


def by_class(step: Callable[[], Any], seconds: float) -> dict[str, float]:
    """Milliseconds of a step by class of kernel.

    Args:
      step: starts one.
      seconds: that one takes, of which no kernel's is idle.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(_PROFILED):
                result = step()
            jax.block_until_ready(result)
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(path)
        found: collections.Counter[str] = collections.Counter()
        for plane in data.planes:
            lines = plane.lines if "gpu" in plane.name.lower() else ()
            for line in lines:
                if not line.name.startswith("Stream"):
                    continue
                for event in line.events:
                    operation = dict(event.stats).get("hlo_op") or ""
                    name = class_of(f"{operation} {event.name}")
                    found[name] += event.duration_ns / _PROFILED / 1e6
    found[IDLE] = max(0.0, 1e3 * seconds - sum(found.values()))
    return dict(found.most_common())


def class_of(name: str) -> str:
    """The class of a kernel by its name."""
    for kind, pattern in _CLASSES.items():
        if re.search(pattern, name.lower()):
            return kind
    return OTHER
