"""Galvatron's decision trees: the strategies that a layer of a Transformer may take.

A tree is for one number of pipeline stages. Its root is the group of devices that a
stage has; every level splits the groups above by one kind of parallelism, of a degree
that is a power of two, and no kind comes twice. The order of the kinds matters: the
first splits over the slowest links. Mixing data parallelism and sharded data
parallelism (ZeRO-3) is never better than the second alone, in memory and in traffic, so
that branches with both are pruned.

Source: Miao et al., Galvatron, VLDB 2023, arXiv:2211.13878, section 3.1.
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshpar.errors import MeshparError
from meshpar.layouts.axes import DATA, FSDP, PIPE, TENSOR
from meshpar.layouts.layout import Layout

KINDS = DATA, FSDP, TENSOR
"""Data parallelism, sharded data parallelism, tensor parallelism."""


class Strategy(NamedTuple):
    """A path from the root of a tree to a leaf.

    Attributes:
      stages: of the pipeline.
      splits: (kind, degree), over slow links first.
    """

    stages: int
    splits: tuple[tuple[str, int], ...]

    @property
    def layout(self) -> Layout:
        """The layout with these degrees; the mesh has an order of its own."""
        return Layout(**{PIPE: self.stages}, **dict(self.splits))


def strategies(devices: int, prune: bool = True) -> list[Strategy]:
    """All strategies of so many devices, tree by tree.

    Args:
      devices: a power of two.
      prune: whether branches that mix data and sharded data parallelism are left out.

    Raises:
      MeshparError: no power of two.
    """
    if devices < 1 or devices & (devices - 1):
        raise MeshparError(f"devices={devices}: use a power of two")
    degrees = [2**i for i in range(devices.bit_length())]
    return [
        Strategy(stages, splits)
        for stages in degrees
        for splits in _paths(devices // stages, (), prune)
    ]


def _paths(
    group: int, used: tuple[str, ...], prune: bool
) -> Iterator[tuple[tuple[str, int], ...]]:
    """Paths below a node whose groups have so many devices."""
    if group == 1:
        yield ()
        return
    for kind in KINDS:
        if kind in used or (prune and {DATA, FSDP} <= {*used, kind}):
            continue
        degree = 2
        while degree <= group:
            for rest in _paths(group // degree, (*used, kind), prune):
                yield ((kind, degree), *rest)
            degree *= 2
