"""Device meshes: named axes over accelerators, simulated CPU devices or topologies."""

import math
import os
import re
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from meshpar import compat, gpu_targets, torus
from meshpar.errors import LayoutError, MeshparError
from meshpar.layouts import AXES, Layout

TPUS = ("v4", "v5e", "v5p", "v6e")

SLOW_AXES = ("replica", "pipe", "data")
"""The axes that may cross links between slices (DCN); all others stay within one."""


def simulate(num_devices: int) -> None:
    """Gives this process `num_devices` CPU devices; accelerators are left as they are.

    Call it before jax looks for devices. Where a GPU or TPU exists it stays the
    default platform, so nothing is simulated unless the platform is set to cpu.

    Raises:
      RuntimeError: jax has already started its backends.
    """
    if compat.backends_started():
        raise RuntimeError(
            f"simulate({num_devices}) came after jax looked for devices; call it first"
        )
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices}: use at least 1")
    compat.prepare_cpu_threads()
    compat.set_simulated_devices(num_devices)


def make_mesh(
    layout: Layout,
    devices: Sequence[jax.Device] | None = None,
    axis_type: AxisType = AxisType.Auto,
) -> Mesh:
    """Builds the mesh of a layout, every axis present, outer axes over slower links.

    Args:
      layout: gives the axis sizes.
      devices: the devices to fill; all of `jax.devices()` by default.
      axis_type: automatic (the default) or explicit axes.

    Raises:
      LayoutError: the layout has more places than there are devices, or leaves devices
        idle without the waiver "idle_devices".
    """
    devices = list(jax.devices() if devices is None else devices)
    need = layout.num_devices
    if need > len(devices):
        raise LayoutError(
            f'layout "{layout}" needs {need} devices (the product of its axes), but '
            f"{len(devices)} {devices[0].platform} device(s) exist; use a smaller "
            f"layout, or simulate {need} CPU devices (--platform=cpu --devices={need})"
        )
    if need < len(devices) and "idle_devices" not in layout.waive:
        raise LayoutError(
            f'layout "{layout}" fills {need} of {len(devices)} devices and would leave '
            f"{len(devices) - need} idle; raise an axis, pass fewer devices "
            f"(--devices={need}), or waive it with waive=idle_devices"
        )
    sizes, kinds = tuple(layout.sizes.values()), (axis_type,) * len(AXES)
    devices = devices[:need]
    slices: dict[int | None, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", None), []).append(device)
    outer = _over_slices(layout, devices, len(slices))
    inner = [size // across for size, across in zip(sizes, outer, strict=True)]
    blocks = np.empty(len(slices), object)
    blocks[:] = [torus.arrange(inner, slices[index]) for index in sorted(slices)]
    arranged = np.block(blocks.reshape(outer).tolist())
    return Mesh(arranged, AXES, axis_types=kinds)


def _over_slices(
    layout: Layout, devices: Sequence[jax.Device], slices: int
) -> list[int]:
    """How many ways each axis crosses the slow links between slices, outer first.

    Raises:
      LayoutError: axes that need fast links would have to cross them.
    """
    left, across = slices, []
    for axis, size in layout.sizes.items():
        may = axis in SLOW_AXES or "slow_links" in layout.waive
        ways = math.gcd(size, left) if may else 1
        across.append(ways)
        left //= ways
    if left > 1:
        raise LayoutError(
            f'layout "{layout}" on {slices} slices of {len(devices) // slices} '
            f"{devices[0].device_kind} devices: only {', '.join(SLOW_AXES)} may cross "
            f"the slow links between slices, and their sizes do not fill {slices}; "
            f"raise one of them to a multiple of {slices}, or let the others cross "
            "with waive=slow_links"
        )
    return across


def topology(text: str) -> list[jax.Device]:
    """The devices of machines that are not here, to compile for ahead of time.

    Programs lowered onto them compile with the real compiler and can be read, but not
    run.

    Args:
      text: a TPU slice such as "v5e:4x4", "v5p:4x4x2", several such as "2*v5e:4x4",
        or GPUs of one NVLink domain such as "h100:8", "h200:8".

    Raises:
      MeshparError: an unknown form, or the compiler is not installed, with the remedy.
    """
    count, _, single = text.rpartition("*")
    kind, _, shape = single.partition(":")
    known = ", ".join(
        [*(f"{k}:4x4" for k in TPUS), *(f"{k}:8" for k in gpu_targets.TARGETS)]
    )
    if kind in gpu_targets.TARGETS and shape.isdigit() and int(shape) and not count:
        return _gpus(kind, int(shape))
    well_formed = re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape)
    if kind not in TPUS or not well_formed or not re.fullmatch(r"(\d+)?", count):
        raise MeshparError(f"topology={text!r}: write one such as {known}")
    # There is no chip: no metadata to ask for, no lock to take.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    chips = shape if shape.count("x") == 2 or kind in ("v5e", "v6e") else f"{shape}x1"
    name = f"{kind}:{chips}"
    try:
        slices = {"num_slices": int(count)} if count else {}
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=name, **slices
        )
    except Exception as error:
        raise MeshparError(
            f"topology={text!r}: {_first_line(error)}; the TPU compiler comes with "
            'pip install "meshpar[aot-tpu]", and the shape must be one that exists'
        ) from error
    return list(found.devices)


def _gpus(kind: str, count: int) -> list[jax.Device]:
    try:
        found = topologies.get_topology_desc(
            platform="cuda",
            topology_name=kind,
            topology=f"1x1x{count}",
            target_config=gpu_targets.TARGETS[kind],
        )
    except Exception as error:
        raise MeshparError(
            f"topology={kind}:{count}: {_first_line(error)}; the GPU compiler comes "
            'with pip install "meshpar[aot-gpu]"'
        ) from error
    return list(found.devices)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else "failed"
