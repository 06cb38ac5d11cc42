"""Transfers that bring a tensor from one layout into another, and their bytes.

Source: Jia et al., arXiv:1807.05358, section 5.1 (communication between operators).
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from meshpar.methods.flexflow.graph import Graph

Split = tuple[frozenset[str], ...]
"""Axes that split each dim of a tensor."""

GATHER, REDUCE = "all_gather", "all_reduce"
SCATTER, EXCHANGE = "reduce_scatter", "all_to_all"

NOTHING: frozenset[str] = frozenset()


Target = tuple[frozenset[str] | None, ...]
"""Axes that a constraint asks for in each dim; None leaves a dim as it is."""


class TensorLayout(NamedTuple):
    """The layout of one tensor: its split, and axes over which it is a partial sum.

    Attributes:
      split: axes that split each dim.
      partial: axes over whose devices the tensor is still a sum of parts.
    """

    split: Split
    partial: frozenset[str] = NOTHING


class Transfer(NamedTuple):
    """One collective.

    Attributes:
      kind: as in `contracts.cost`.
      axis: that it runs over.
      tensor: that it moves.
      becomes: its layout afterwards.
      payload: bytes, as `contracts.cost` counts them.
      times: how often it runs in a step.
    """

    kind: str
    axis: str
    tensor: int
    becomes: TensorLayout
    payload: float
    times: int


class Transfers:
    """Transfers of the tensors of one graph on a mesh of some sizes."""

    def __init__(self, graph: Graph, sizes: Mapping[str, int], reduces_late: bool):
        """Prepares the mesh.

        Args:
          graph: of a step.
          sizes: {axis: size} of the axes larger than 1.
          reduces_late: as of `mesh.platform.Platform`.
        """
        self.graph, self.sizes = graph, sizes
        self.reduces_late = reduces_late

    def local_bytes(self, tensor: int, split: Split) -> float:
        """Bytes of a tensor on one device."""
        return self.graph.tensors[tensor].size / self.ways(split)

    def ways(self, split: Split) -> int:
        """Devices over which a layout spreads a tensor."""
        return math.prod(self.sizes[axis] for axes in split for axis in axes)

    def resolved(
        self, tensor: int, held: TensorLayout, split: Split, times: int
    ) -> list[Transfer]:
        """The transfers that bring a tensor into a layout without partial sums.

        Args:
          tensor: its number.
          held: how it is laid out.
          split: axes that shall split each dim; to split a whole dim costs nothing.
          times: how often this happens in a step.
        """
        transfers = []
        # First those that leave a device a part alone.
        whole = [axis for axis in self.sizes if dim_of(split, axis) is None]
        for axis in sorted(held.partial, key=lambda axis: axis in whole):
            dim = dim_of(split, axis)
            now, payload = held.split, self.local_bytes(tensor, held.split)
            if dim is not None:
                now = with_axis(now, dim, axis)
            kind = SCATTER if dim is not None and self.reduces_late else REDUCE
            held = TensorLayout(now, held.partial - {axis})
            transfers.append(Transfer(kind, axis, tensor, held, payload, times))
        for axis in self.sizes:
            before = dim_of(held.split, axis)
            after = dim_of(split, axis)
            if before is None or before == after:
                continue
            bare = without_axis(held.split, axis)
            payload = self.local_bytes(tensor, bare)
            kind, now = GATHER, bare
            if after is not None:
                kind, now = EXCHANGE, with_axis(bare, after, axis)
                payload /= self.sizes[axis]
            held = TensorLayout(now)
            transfers.append(Transfer(kind, axis, tensor, held, payload, times))
        return transfers


def dim_of(split: Split, axis: str) -> int | None:
    """The dim that an axis splits, or None."""
    return next((d for d, axes in enumerate(split) if axis in axes), None)


def with_axis(split: Split, dim: int, axis: str) -> Split:
    """A split with an axis more on a dim."""
    return (*split[:dim], split[dim] | {axis}, *split[dim + 1 :])


def without_axis(split: Split, axis: str) -> Split:
    """A split without an axis."""
    return tuple(axes - {axis} for axes in split)
