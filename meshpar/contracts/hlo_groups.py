"""Device groups in the text of a compiled program, and the mesh axes that they span.

HLO text writes the groups of a collective as lists of devices, as a reshaped iota, by
mesh axes, as pairs of sender and receiver, or (between TPU slices) as slices and their
devices.
"""

import functools
import itertools
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}"
)
_IOTA_GROUPS = re.compile(
    r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
)

_STATED = re.compile(
    r"((?:replica_groups|source_target_pairs)=.*?)(?:, (?!device_ids)[a-z_]+=|$)"
)
"""The part of a line that states the groups."""


def _iota(dims: str, order: str | None) -> np.ndarray:
    """Device ids of the form [2,4]T(1,0): an iota of shape `dims`, then transposed."""
    shape = [int(d) for d in dims.split(",")]
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose([int(d) for d in order.split(",")]) if order else ids


def _mesh_groups(sizes: str, devices: np.ndarray | None, axes: str) -> list[list[int]]:
    """Groups of the form mesh['a'=4,'b'=2] {'a':(1)2,'b'}.

    The compiler's axis names are not ours. 'a':(m)k is a part of axis 'a': its size is
    k, and the axes that are left of it in 'a' have m places together.
    """
    named = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    shape, chosen = [], []
    wanted = {
        name: (int(before or 1), int(size or named[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
    }
    for name, whole in named.items():
        before, size = wanted.get(name, (1, 1))
        chosen.append(len(shape) + 1)
        shape += [before, size, whole // (before * size)]
    ids = np.arange(math.prod(shape)) if devices is None else devices
    ids, last = ids.reshape(shape), range(len(shape) - len(chosen), len(shape))
    width = math.prod(shape[i] for i in chosen)
    return np.moveaxis(ids, chosen, last).reshape(-1, width).tolist()


def _groups(line: str, num_devices: int) -> list[list[int]]:
    """The device groups of a collective within one slice."""
    if match := _MESH_GROUPS.search(line):
        sizes, dims, order, axes = match.groups()
        return _mesh_groups(sizes, _iota(dims, order) if dims else None, axes)
    if match := _IOTA_GROUPS.search(line):
        shape, dims, order = match.groups()
        return _iota(dims, order).reshape([int(d) for d in shape.split(",")]).tolist()
    if match := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", line):
        inner = re.findall(r"\{([\d, ]+)\}", match.group(1))
        return [[int(d) for d in group.split(",")] for group in inner]
    if "replica_groups={}" in line or "replica_groups=" not in line:
        return [list(range(num_devices))]
    raise ValueError(f"cannot read the replica groups of: {line[:300]}")


@functools.lru_cache
def _axis_groups(mesh: tuple[tuple[str, int], ...]) -> dict[frozenset, tuple[str, ...]]:
    """{groups: axes} for all sets of mesh axes; the smallest of equal sets counts."""
    names, sizes = zip(*mesh, strict=True)
    ids, groups = np.arange(math.prod(sizes)).reshape(sizes), {}
    split = [i for i, size in enumerate(sizes) if size > 1]
    for count in range(1, len(split) + 1):
        for chosen in itertools.combinations(split, count):
            last = range(len(sizes) - count, len(sizes))
            rows = np.moveaxis(ids, chosen, last)
            rows = rows.reshape(-1, math.prod(sizes[i] for i in chosen))
            key = frozenset(frozenset(row) for row in rows.tolist())
            groups.setdefault(key, tuple(names[i] for i in chosen))
    return groups


class Groups(NamedTuple):
    """The devices that take part together in a collective.

    Attributes:
      axes: the smallest set of mesh axes along which the devices of a group differ,
        outer to inner.
      size: number of devices in a group; in the largest one, if they differ.
      partial: whether a group is only a part of the devices along `axes`.
    """

    axes: tuple[str, ...]
    size: int
    partial: bool


def groups_of(line: str, mesh: Mapping[str, int]) -> Groups:
    """The groups of devices of a collective.

    Args:
      line: text of the instruction.
      mesh: {axis: size}, outer to inner.

    Raises:
      ValueError: the groups have an unknown form.
    """
    if "_xla_megascale_target" not in line and (stated := _STATED.search(line)):
        return _groups_of(stated.group(1), tuple(mesh.items()))
    return _groups_of(line, tuple(mesh.items()))


@functools.lru_cache(maxsize=1024)
def _groups_of(line: str, sizes: tuple[tuple[str, int], ...]) -> Groups:
    mesh = dict(sizes)
    if pairs := _pairs(line):
        axes = _crossed(pairs, mesh)
        return Groups(axes, math.prod(mesh[axis] for axis in axes), False)
    count = math.prod(mesh.values())
    if target := re.search(r"_xla_megascale_target=(\S+?),?_xla", line):
        groups = _groups_of_slices(target.group(1), count)
    else:
        groups = _groups(line, count)
        slice_size = sum(map(len, groups))  # The text lists the groups of one slice.
        groups = [
            [device + start for device in group]
            for start in range(0, count, slice_size)
            for group in groups
        ]
    size = max(map(len, groups))
    key = frozenset(frozenset(group) for group in groups)
    if axes := _axis_groups(sizes).get(key):
        return Groups(axes, size, False)
    return Groups(_crossed(groups, mesh), size, size > 1)


def rotates(line: str, mesh: Mapping[str, int]) -> bool:
    """Whether a permute sends everything equally far along its axes, as rings do.

    Args:
      line: text of the instruction.
      mesh: {axis: size}, outer to inner.
    """
    pairs, shape = np.array(_pairs(line)), tuple(mesh.values())
    axes = _crossed(pairs.tolist(), mesh)
    moving = [i for i, axis in enumerate(mesh) if axis in axes]
    places = np.array(np.unravel_index(pairs, shape))[moving]
    sizes = [shape[i] for i in moving]
    sources, targets = np.ravel_multi_index(tuple(places), sizes).T
    return len(set((targets - sources) % math.prod(sizes))) == 1


def _pairs(line: str) -> list[list[int]]:
    """Pairs of (sender, receiver) of a permute; [] of all others."""
    match = re.search(r"source_target_pairs=\{([\d,{} ]*)\}", line)
    pairs = re.findall(r"\{(\d+), ?(\d+)\}", match.group(1)) if match else []
    return [[int(device) for device in pair] for pair in pairs]


def _crossed(groups: list[list[int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which devices of a group differ."""
    shape, crossed = tuple(mesh.values()), np.zeros(len(mesh), bool)
    for group in groups:
        places = np.array(np.unravel_index(group, shape))
        crossed |= (places != places[:, :1]).any(axis=1)
    return tuple(axis for axis, moves in zip(mesh, crossed, strict=True) if moves)


def _groups_of_slices(target: str, count: int) -> list[list[int]]:
    """Groups of a transfer between slices.

    The text is "{1,2}x{0:3}" (slices, from 1, by devices) or {{100000,200000},...} (the
    slice times 100000 plus the device).
    """
    if short := re.match(r'"\{([\d,]*)\}x', target):
        slices = len(short.group(1).split(","))
        return np.arange(count).reshape(slices, -1).T.tolist()
    groups = [
        [divmod(int(number), 100_000) for number in group.split(",")]
        for group in re.findall(r"\{([\d,]+)\}", target)
    ]
    size = count // max(slice_ for group in groups for slice_, _ in group)
    return [[(slice_ - 1) * size + device for slice_, device in g] for g in groups]
