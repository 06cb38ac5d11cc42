"""Makes the program of all islands from the lowering of one."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshpar.errors import LayoutError
from meshpar.islands.mode import Islands
from meshpar.islands.program import IslandsProgram
from meshpar.lowering.train_program import TrainProgram
from meshpar.replicated import map_rows, num_rows


def make_program(
    lower: Callable[..., TrainProgram],
    mode: Islands,
    batch: Any,
    devices: Sequence[jax.Device] | None,
    num_devices: int,
) -> IslandsProgram:
    """Makes the program of islands; nothing is compiled yet.

    Args:
      lower: (batch, devices=...) -> the program of one island.
      mode: the mode.
      batch: pytree of arrays or ShapeDtypeStructs [batch, ...], that of all islands.
      devices: devices to fill; all by default.
      num_devices: devices of one island.

    Raises:
      LayoutError: too few devices, or a batch that does not divide over the islands.
    """
    devices = list(jax.devices() if devices is None else devices)
    apart = mode.workers if mode.host == "threads" else 1
    if len(devices) < apart * num_devices:
        raise LayoutError(
            f"{mode.workers} islands of {num_devices} device(s) need "
            f"{apart * num_devices} devices, and there are {len(devices)}: use fewer "
            "islands or a smaller layout"
        )
    rows = num_rows(batch)
    if rows % mode.workers:
        raise LayoutError(
            f"a batch of {rows} rows does not divide over {mode.workers} islands; use "
            f"a multiple of {mode.workers}"
        )

    def part(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows // mode.workers, *x.shape[1:]), x.dtype)

    part_batch = map_rows(part, batch)
    programs = tuple(
        lower(part_batch, devices=devices[i * num_devices : (i + 1) * num_devices])
        for i in range(apart)
    )
    first = {
        f.name: getattr(programs[0], f.name) for f in dataclasses.fields(TrainProgram)
    }
    build = None
    if mode.host == "ray":
        build = functools.partial(_build, lower, part_batch, num_devices)
    return IslandsProgram(**first, mode=mode, programs=programs, build=build)


def _build(lower: Callable, part_batch: Any, num_devices: int) -> TrainProgram:
    """The program of an island on the first devices of this process."""
    return lower(part_batch, devices=jax.devices()[:num_devices])
