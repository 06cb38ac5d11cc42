"""Boxes of tensors, by which parts of a state find their place on another layout."""

import math
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from meshpar.errors import CheckpointError


class Box(NamedTuple):
    """A box of one leaf.

    Attributes:
      leaf: key path of the leaf.
      start: where the box begins, per dim.
      shape: its shape.
    """

    leaf: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        start, shape = (",".join(map(str, dims)) for dims in self[1:])
        return f"{self.leaf}@{start}+{shape}"

    @classmethod
    def parse(cls, text: str) -> "Box":
        """The inverse of `str`."""
        leaf, *dims = re.fullmatch(r"(.*)@([\d,]*)\+([\d,]*)", text).groups()
        return cls(leaf, *(tuple(map(int, re.findall(r"\d+", d))) for d in dims))

    @classmethod
    def at(cls, leaf: str, index: tuple[slice, ...], shape: tuple[int, ...]) -> "Box":
        """The box at an index of a leaf of this shape."""
        ends = [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        return cls(leaf, tuple(a for a, _ in ends), tuple(b - a for a, b in ends))

    def common(self, other: "Box") -> list[tuple[int, int]]:
        """Begin and end, per dim, of what lies in both."""
        mine = zip(self.start, self.shape, strict=True)
        theirs = zip(other.start, other.shape, strict=True)
        return [
            (max(a, b), min(a + n, b + m))
            for (a, n), (b, m) in zip(mine, theirs, strict=True)
        ]

    def overlaps(self, other: "Box") -> bool:
        """Whether the two have an element in common."""
        return self.leaf == other.leaf and all(a < b for a, b in self.common(other))

    def within(self, common: list[tuple[int, int]]) -> tuple[slice, ...]:
        """Where that lies in this box."""
        return tuple(
            slice(a - first, b - first)
            for (a, b), first in zip(common, self.start, strict=True)
        )


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """{key path: leaf}."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(keys): leaf for keys, leaf in found}


def complete_boxes(
    claims: Mapping[int, Collection[str]], wanted: Mapping[str, Any], name: str
) -> list[Box]:
    """All pieces, if the processes together hold everything.

    Args:
      claims: {process: the texts of the pieces that it holds}.
      wanted: {key path: leaf}.
      name: of the checkpoint, for the error.

    Raises:
      CheckpointError: they do not; says what they lack.
    """
    texts = {text for one in claims.values() for text in one}
    pieces, held = sorted(map(Box.parse, texts)), dict.fromkeys(wanted, 0)
    for piece in pieces:
        if piece.leaf in held:
            held[piece.leaf] += math.prod(piece.shape)
    for path, leaf in wanted.items():
        if held[path] < leaf.size:
            raise CheckpointError(
                f"the disks of {len(claims)} process(es) do not hold all of {name}: of "
                f"{path} they hold {held[path]} of {leaf.size} elements"
            )
    return pieces


def assemble_shard(
    path: str,
    leaf: Any,
    parts: Mapping[Box, np.ndarray],
    index: tuple[slice, ...],
) -> np.ndarray:
    """One shard of a leaf, out of the pieces that it overlaps.

    Args:
      path: key path of the leaf.
      leaf: its shape and dtype.
      parts: {piece: its numbers}; together they hold the shard.
      index: where the shard lies.
    """
    box = Box.at(path, index, leaf.shape)
    made = np.empty(box.shape, leaf.dtype)
    for piece, values in parts.items():
        if piece.overlaps(box):
            common = piece.common(box)
            made[box.within(common)] = values[piece.within(common)]
    return made
