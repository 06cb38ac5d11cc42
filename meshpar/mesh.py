"""Device meshes: named axes over accelerators or simulated CPU devices."""

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from meshpar import compat
from meshpar.layouts import AXES, Layout, LayoutError


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
    need, sizes = layout.num_devices, "*".join(map(str, layout.sizes.values()))
    if need > len(devices):
        raise LayoutError(
            f'layout "{layout}" needs {"*".join(AXES)}={sizes}={need} devices, but '
            f"{len(devices)} {devices[0].platform} device(s) exist; use a smaller "
            f"layout, or simulate {need} CPU devices (--platform=cpu --devices={need})"
        )
    if need < len(devices) and "idle_devices" not in layout.waive:
        raise LayoutError(
            f'layout "{layout}" fills {need} of {len(devices)} devices and would leave '
            f"{len(devices) - need} idle; raise an axis, pass fewer devices "
            f"(--devices={need}), or waive it with waive=idle_devices"
        )
    return jax.make_mesh(
        tuple(layout.sizes.values()),
        AXES,
        axis_types=(axis_type,) * len(AXES),
        devices=devices[:need],
    )
