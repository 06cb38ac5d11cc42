"""Device meshes of layouts: named axes over accelerators, CPUs or topologies."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from meshpar import compat
from meshpar.errors import LayoutError
from meshpar.layouts.axes import AXES, SLOW_AXES
from meshpar.layouts.layout import Layout
from meshpar.mesh.slices import slice_of
from meshpar.mesh.torus import arrange_devices

MAX_SIMULATED = 4096
"""Most devices that one process simulates; each has threads of its own."""


def simulate(num_devices: int) -> None:
    """Simulates devices: the CPU backend of this process will have `num_devices`.

    Call it before jax looks for devices. A GPU or TPU stays the default platform, so
    set the platform to cpu where there is one. XLA_FLAGS gain options by which the CPU
    compiles faster, unless they name them.

    Raises:
      RuntimeError: jax has already started its backends, with another number.
      LayoutError: num_devices is below 1 or above `MAX_SIMULATED`.
    """
    whole = isinstance(num_devices, int) and not isinstance(num_devices, bool)
    if not whole or not 1 <= num_devices <= MAX_SIMULATED:
        raise LayoutError(
            f"simulate({num_devices!r}): one process simulates 1 to {MAX_SIMULATED:,} "
            "devices; use a smaller layout, or compile for a machine that is not "
            "present (meshpar.mesh.topology; a command: --topology)"
        )
    if compat.backends_started():
        if len(jax.devices("cpu")) == num_devices:
            return  # A cell of a notebook runs twice.
        raise RuntimeError(
            f"simulate({num_devices}) came after jax looked for devices; call it first"
        )
    compat.prepare_cpu_threads()
    compat.quicken_cpu_compiler()
    compat.quiet_absent_tpus()
    compat.set_simulated_devices(num_devices)


def make_mesh(
    layout: Layout,
    devices: Sequence[jax.Device] | None = None,
    axis_type: AxisType = AxisType.Auto,
) -> Mesh:
    """Builds the mesh of a layout with every axis, outer axes over slower links.

    Args:
      layout: gives the axis sizes.
      devices: the devices to use; all of `jax.devices()` by default.
      axis_type: automatic (the default) or explicit axes.

    Raises:
      LayoutError: there are too few devices; some would be idle without
        allow=idle_devices; slices would have unequal numbers of devices; or axes would
        cross slow links without allow=slow_links.
    """
    devices = list(jax.devices() if devices is None else devices)
    need = layout.num_devices
    if not devices or len(set(devices)) < len(devices):
        raise LayoutError(
            f"devices={devices}: give at least one device, and each of them once"
        )
    if need > len(devices):
        raise LayoutError(
            f'layout "{layout}" needs {need} devices (the product of its axes), but '
            f"{len(devices)} {devices[0].platform} device(s) exist; use a smaller "
            f"layout, or call meshpar.simulate({need}) before jax looks for devices (a "
            f"command: --platform=cpu --devices={need})"
        )
    if need < len(devices) and "idle_devices" not in layout.allow:
        raise LayoutError(
            f'layout "{layout}" fills {need} of {len(devices)} devices and would leave '
            f"{len(devices) - need} idle; raise an axis, give devices= of {need} (a "
            f"command: --devices={need}), or allow it with allow=idle_devices"
        )
    sizes, kinds = tuple(layout.sizes.values()), (axis_type,) * len(AXES)
    devices = devices[:need]
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(slice_of(device), []).append(device)
    if len(counts := {len(group) for group in slices.values()}) > 1:
        raise LayoutError(
            f'layout "{layout}" fills {need} devices of {len(slices)} slices, with '
            f"{min(counts)} to {max(counts)} devices per slice; fill every slice "
            "equally, or pass the devices of one slice"
        )
    outer = _over_slices(layout, devices, len(slices))
    inner = [size // across for size, across in zip(sizes, outer, strict=True)]
    blocks = np.empty(len(slices), object)
    blocks[:] = [arrange_devices(inner, slices[index]) for index in sorted(slices)]
    arranged = np.block(blocks.reshape(outer).tolist())
    return Mesh(arranged, AXES, axis_types=kinds)


def _over_slices(
    layout: Layout, devices: Sequence[jax.Device], slices: int
) -> list[int]:
    """The number of slices over which each axis is spread, outer to inner.

    Raises:
      LayoutError: axes that need fast links would have to cross slices.
    """
    left, across = slices, []
    for axis, size in layout.sizes.items():
        may = axis in SLOW_AXES or "slow_links" in layout.allow
        ways = math.gcd(size, left) if may else 1
        across.append(ways)
        left //= ways
    if left > 1:
        raise LayoutError(
            f'layout "{layout}" on {slices} slices of {len(devices) // slices} '
            f"{devices[0].device_kind} devices: only {', '.join(SLOW_AXES)} may cross "
            f"the slow links between slices, and their sizes do not fill {slices}; "
            f"raise one of them to a multiple of {slices}, or let the others cross "
            "with allow=slow_links"
        )
    return across
