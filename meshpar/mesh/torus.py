"""Rings on the torus of TPU chips: the order of devices along a mesh axis.

A chip has links to its neighbors only. TPUs overlap a permute with compute if it takes
at most two links (v5e from 32 chips on, seen with libtpu 0.0.51). In a ring that runs
along a line of chips and jumps back, the jump takes as many links as the line is long.
So lines are folded: forward over every other chip, and back over the chips between.
"""

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from meshpar.mesh.platform import TPU
from meshpar.mesh.slices import slice_of


def arrange_devices(sizes: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Arranges the devices of one slice so that rings along axes join near neighbors.

    jax chooses the devices of each axis. Their order along the axis is ours, where they
    form a grid of chips.

    Args:
      sizes: sizes of the mesh axes, outer to inner.
      devices: the devices of the slice; their number is the product of the sizes.

    Returns:
      Devices [*sizes].
    """
    mesh = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    for axis in np.flatnonzero(np.array(mesh.shape) > 1):
        offsets = _offsets(mesh, axis)
        if lines := _lines(offsets):
            index = {tuple(at): i for i, at in enumerate(offsets[:, list(lines)])}
            rings = itertools.product(*map(_ring, lines.values()))
            mesh = np.take(mesh, [index[at] for at in rings], axis)
    return mesh


@functools.lru_cache(maxsize=256)
def ring_shape(mesh: Mesh, axis: str) -> tuple[int, ...]:
    """Shape of the torus whose rings make up a mesh axis, in row order.

    It is the torus of the chips where they form a grid, else the most square torus of
    two dims.
    """
    size = mesh.shape[axis]
    if lines := _lines(_offsets(mesh.devices, mesh.axis_names.index(axis))):
        return tuple(map(len, lines.values()))
    rows = max(rows for rows in range(1, math.isqrt(size) + 1) if size % rows == 0)
    return tuple(n for n in (rows, size // rows) if n > 1)


def _ring(line: list[int]) -> list[int]:
    """The order along a line of chips: folded (0 2 4 ... 5 3 1) if they are neighbors.

    A chain is shorter than a fold if other chips are between them.
    """
    return line[::2] + line[1::2][::-1] if line[1] - line[0] == 1 else line


def _offsets(devices: np.ndarray, axis: int) -> np.ndarray | None:
    """Offsets of the devices along an axis from the first, [size, 5].

    The columns are slice, x, y, z and core. None if the offsets are not the same
    everywhere in the mesh, or the devices are not TPUs.
    """
    if any(device.platform != TPU.name for device in devices.flat):
        return None
    coords = np.array(
        [
            (
                slice_of(d),
                *d.coords,
                getattr(d, "core_on_chip", 0),
            )
            for d in np.moveaxis(devices, axis, 0).flat
        ]
    ).reshape(devices.shape[axis], -1, 5)
    offsets = coords - coords[:1]
    return offsets[:, 0] if (offsets == offsets[:, :1]).all() else None


def _lines(offsets: np.ndarray | None) -> dict[int, list[int]]:
    """{column of the offsets: its values} of the grid that they form; {} if none.

    The order is that of a torus's dims: slices first, as their links are slowest, then
    lines of near neighbors, long ones first. The first rings of a reduce_scatter move
    the most bytes.
    """
    if offsets is None:
        return {}
    values = {dim: sorted(set(column.tolist())) for dim, column in enumerate(offsets.T)}
    lines = {dim: line for dim, line in values.items() if len(line) > 1}
    if math.prod(map(len, lines.values())) != len({tuple(o) for o in offsets.tolist()}):
        return {}
    near = sorted(
        lines, key=lambda d: (d > 0, lines[d][1] - lines[d][0], -len(lines[d]))
    )
    return {dim: lines[dim] for dim in near}
