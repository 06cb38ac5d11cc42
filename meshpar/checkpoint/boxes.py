"""Boxes: rectangular parts of tensors, from which any layout's shards are assembled."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from meshpar.errors import CheckpointError


class Box(NamedTuple):
    """A rectangular part of one leaf.

    Attributes:
      leaf: key path of the leaf.
      start: first index, per dim.
      shape: size, per dim.
    """

    leaf: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        start, shape = (",".join(map(str, dims)) for dims in self[1:])
        return f"{self.leaf}@{start}+{shape}"

    @classmethod
    def parse(cls, text: str) -> "Box":
        """Reads a box from the text that `str` gives for it."""
        leaf, *dims = re.fullmatch(r"(.*)@([\d,]*)\+([\d,]*)", text).groups()
        return cls(leaf, *(tuple(map(int, re.findall(r"\d+", d))) for d in dims))

    @classmethod
    def at(cls, leaf: str, index: tuple[slice, ...], shape: tuple[int, ...]) -> "Box":
        """The box that an index, one slice per dim, selects in a leaf of this shape."""
        ranges = [dim.indices(size)[:2] for dim, size in zip(index, shape, strict=True)]
        return cls(leaf, tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))

    def intersection(self, other: "Box") -> list[tuple[int, int]]:
        """(begin, end) per dim of the elements in both boxes; begin >= end if none."""
        dims = zip(self.start, self.shape, other.start, other.shape, strict=True)
        return [(max(a, b), min(a + n, b + m)) for a, n, b, m in dims]

    def overlaps(self, other: "Box") -> bool:
        """Whether the two boxes share an element."""
        return self.leaf == other.leaf and all(
            begin < end for begin, end in self.intersection(other)
        )

    def slices(self, ranges: list[tuple[int, int]]) -> tuple[slice, ...]:
        """Slices of this box's own array for (begin, end) ranges of the leaf."""
        return tuple(
            slice(begin - first, end - first)
            for (begin, end), first in zip(ranges, self.start, strict=True)
        )


def complete_boxes(
    held: Mapping[int, Collection[str]], leaves: Mapping[str, Any], name: str
) -> list[Box]:
    """All boxes that the processes hold, if together they hold every leaf.

    Args:
      held: {process: the texts of the boxes on its disk}.
      leaves: {key path: leaf}, what has to be held.
      name: of the checkpoint, for the error.

    Raises:
      CheckpointError: elements of a leaf are missing; says of which and how many.
    """
    texts = {text for boxes in held.values() for text in boxes}
    boxes, num_elements = sorted(map(Box.parse, texts)), dict.fromkeys(leaves, 0)
    for box in boxes:
        if box.leaf in num_elements:
            num_elements[box.leaf] += math.prod(box.shape)
    for path, leaf in leaves.items():
        if num_elements[path] < leaf.size:
            raise CheckpointError(
                f"the disks of {len(held)} process(es) do not hold all of {name}: of "
                f"{path} they hold {num_elements[path]} of {leaf.size} elements"
            )
    return boxes


def assemble_shard(
    path: str,
    leaf: Any,
    contents: Mapping[Box, np.ndarray],
    index: tuple[slice, ...],
) -> np.ndarray:
    """Assembles one shard of a leaf from the boxes that it overlaps.

    Args:
      path: key path of the leaf.
      leaf: anything with the leaf's shape and dtype.
      contents: {box: its array}; together they cover the shard.
      index: the shard's place in the leaf, one slice per dim.
    """
    shard_box = Box.at(path, index, leaf.shape)
    shard = np.empty(shard_box.shape, leaf.dtype)
    for box, array in contents.items():
        if box.overlaps(shard_box):
            ranges = box.intersection(shard_box)
            shard[shard_box.slices(ranges)] = array[box.slices(ranges)]
    return shard
