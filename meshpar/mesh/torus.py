"""Rings on the torus of TPU chips: the order of devices along a mesh axis.

A chip has links to its neighbours alone. TPUs send beside compute over at most two of
them (v5e from 32 chips on, seen with libtpu 0.0.51), and a ring that runs along a line
of chips and jumps back takes as many as the line is long. So lines are folded: out over
every other chip, and back over the ones between.
"""

import itertools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from meshpar.mesh.platform import TPU, platform_of


def arrange_devices(sizes: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Devices of one slice, [*sizes]: along every axis lie rings of near neighbours.

    Which devices form an axis is jax's choice; the order along it is ours, where they
    form a grid of chips.

    Args:
      sizes: of the mesh axes, outer to inner.
      devices: as many as the axes have places.
    """
    mesh = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    for axis in range(mesh.ndim):
        places = _places(mesh, axis)
        if lines := _lines(places):
            at = {tuple(place): i for i, place in enumerate(places[:, list(lines)])}
            order = [
                at[place] for place in itertools.product(*map(_ring, lines.values()))
            ]
            mesh = np.take(mesh, order, axis)
    return mesh


def ring_shape(mesh: Mesh, axis: str) -> tuple[int, ...]:
    """The torus whose rings make up a mesh axis, in row order.

    That of the chips where they form a grid, else the most square one of two dims.
    """
    size = mesh.shape[axis]
    if lines := _lines(_places(mesh.devices, mesh.axis_names.index(axis))):
        return tuple(map(len, lines.values()))
    rows = max(rows for rows in range(1, math.isqrt(size) + 1) if size % rows == 0)
    return tuple(n for n in (rows, size // rows) if n > 1)


_MOST_WRITTEN_OUT = 64
"""Devices of a permute; with more, a lookup is the sooner compiled (libtpu 0.0.51)."""


def compiler_options(mesh: Mesh) -> dict[str, str] | None:
    """What a TPU's compiler is told of the permutes that rings are made of.

    For a permute that all devices take part in, libtpu writes code for every pair of
    them: 0.2 s of CPU for 256 chips of v5e, 0.3 s for v5p. Of many devices it shall
    look the way up, as it does where a pair is missing: 0.03 s, and 0.06 s per MB.
    """
    if platform_of(mesh) is not TPU or mesh.size <= _MOST_WRITTEN_OUT:
        return None
    most = "xla_tpu_max_collective_permute_tree_core_location_devices"
    return {most: str(_MOST_WRITTEN_OUT)}


def _ring(line: list[int]) -> list[int]:
    """The order along a line of chips: folded, 0 2 4 ... 5 3 1, if they are neighbours.

    Where others lie between them a fold would be too long, and only a chain is short.
    """
    return line[::2] + line[1::2][::-1] if line[1] - line[0] == 1 else line


def _places(devices: np.ndarray, axis: int) -> np.ndarray | None:
    """Where the devices along an axis are, [size, 5]: slice, x, y, z, core.

    Relative to the first of them; None unless it is the same all over the mesh.
    """
    if any(device.platform != TPU.name for device in devices.flat):
        return None
    places = np.array(
        [
            (
                getattr(d, "slice_index", 0) or 0,
                *d.coords,
                getattr(d, "core_on_chip", 0),
            )
            for d in np.moveaxis(devices, axis, 0).flat
        ]
    ).reshape(devices.shape[axis], -1, 5)
    places -= places[:1]
    return places[:, 0] if (places == places[:, :1]).all() else None


def _lines(places: np.ndarray | None) -> dict[int, list[int]]:
    """{column of the places: its values} for the grid that they form; {} if none.

    Slices come first, as they are slowest, then lines of near neighbours, long ones
    before short: the first rings of a reduce_scatter move the most.
    """
    if places is None:
        return {}
    values = {dim: sorted(set(column.tolist())) for dim, column in enumerate(places.T)}
    lines = {dim: line for dim, line in values.items() if len(line) > 1}
    if math.prod(map(len, lines.values())) != len({tuple(p) for p in places.tolist()}):
        return {}
    near = sorted(
        lines, key=lambda d: (d > 0, lines[d][1] - lines[d][0], -len(lines[d]))
    )
    return {dim: lines[dim] for dim in near}
