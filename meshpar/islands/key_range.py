"""Key ranges: parts of the store with one place and one vector clock each."""

import dataclasses
from typing import NamedTuple

import numpy as np

from meshpar.errors import MeshparError


@dataclasses.dataclass(frozen=True)
class KeyRange:
    """A named range of keys [0, size), with one number per key.

    Attributes:
      name: unique in the store; it gives the range its place on the ring.
      size: number of keys.
      dtype: dtype of the values.
    """

    name: str
    size: int
    dtype: str = "float32"

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name or "|" in self.name:
            raise MeshparError(f"range name={self.name!r}: use a text without '|'")
        if not isinstance(self.size, int) or self.size < 1:
            raise MeshparError(
                f"range {self.name}: size={self.size!r}: use a whole number >= 1"
            )


class Slice(NamedTuple):
    """The part [start, stop) of a vector that one range holds."""

    range: KeyRange
    start: int
    stop: int


def split(name: str, size: int, parts: int) -> list[Slice]:
    """Cuts the keys [0, size) of one vector into ranges of almost equal size.

    Args:
      name: the ranges are called "NAME/0", "NAME/1" and so on.
      size: length of the vector.
      parts: number of ranges.

    Raises:
      MeshparError: more parts than keys, or none.
    """
    if not 1 <= parts <= size:
        raise MeshparError(
            f"{name}: parts={parts}: use 1 to {size}, the number of keys"
        )
    cuts = [size * i // parts for i in range(parts + 1)]
    return [
        Slice(KeyRange(f"{name}/{i}", stop - start), start, stop)
        for i, (start, stop) in enumerate(zip(cuts, cuts[1:], strict=False))
    ]


class Contribution(NamedTuple):
    """An update as the server-side function sees it.

    Attributes:
      worker: who pushed it; "" for the average of a round.
      clock: the worker's clock, or the round.
      values: numbers; one per key of the range, or one per entry of `keys`.
      keys: sorted keys of a sparse update; None if dense.
      weight: the worker's weight, such as its number of tokens; 1 for an average.
      staleness: updates that the range has applied since the worker read it.
      read: the values that the worker had read, if it sent them along; else None.
    """

    worker: str
    clock: int
    values: np.ndarray
    keys: np.ndarray | None = None
    weight: float = 1.0
    staleness: int = 0
    read: np.ndarray | None = None
