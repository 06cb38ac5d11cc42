"""Predicts seconds per step of a recipe on machines that are not present."""

import dataclasses

from meshpar import mesh
from meshpar.errors import ConfigError, nearest
from meshpar.layouts.axes import AXES
from meshpar.layouts.layout import Layout, parse
from meshpar.runs import programs
from meshpar.runs.config import RunConfig


def layout_over(text: str, axis: str, num_devices: int) -> Layout:
    """A layout whose axis is as large as the number of devices allows.

    Args:
      text: the layout without that axis; "" for none.
      axis: its name.
      num_devices: of the machine.

    Raises:
      MeshparError: an unknown axis, one that the layout sets, or devices that the other
        axes do not divide.
    """
    if axis not in AXES:
        raise ConfigError(f"axis={axis!r}; {nearest(axis, AXES)}")
    rest = parse(text or f"{axis}=1")
    if rest.sizes[axis] > 1:
        raise ConfigError(
            f"layout={text!r} sets {axis}, which all devices that it leaves are spread "
            "over; leave it out of the layout"
        )
    if num_devices % rest.num_devices:
        raise ConfigError(
            f"layout={text!r} fills {rest.num_devices} devices, which do not divide "
            f"{num_devices}; use other axes or another machine"
        )
    size = num_devices // rest.num_devices
    return dataclasses.replace(rest, **{axis: size})


def seconds_per_step(config: RunConfig, axis: str, topology: str) -> tuple[int, float]:
    """(devices of a machine, predicted seconds per step), by compiling for it.

    It adds the cycles that the compiler states and the transfers that no compute hides:
    a model for comparing programs, and no measurement of a chip.

    Args:
      config: the recipe; its layout holds the axes beside `axis`.
      axis: over which the devices are spread that the layout leaves.
      topology: the machine, such as "v5e:4x4".

    Raises:
      MeshparError: a machine or a layout that cannot be, or a compiler that states no
        cycles.
    """
    devices = mesh.topology(topology)
    layout = layout_over(config.layout, axis, len(devices))
    config, run = config.prepared()
    program = programs.make_program(config, run, layout, devices)
    found = program.inspection.time
    if found is None:
        raise ConfigError(
            f"topology={topology}: its compiler states no cycles; use a TPU, such as "
            "v5e:4x4"
        )
    return len(devices), found.seconds
