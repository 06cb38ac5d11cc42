"""The use of the mesh axis `tensor` by layers: the option `layers` of a layout.

    tensor    devices split the features of a layer (Megatron)
    fsdp      devices have rows of their own, and gather the layer's weights, as along
              `fsdp` (ZeRO-3)

`8*tensor+24*fsdp` gives consecutive layers uses of their own (`mixes`). Embedding and
head are split over `tensor` under all of them, and so are the weights of the layers.

Source: Miao et al., Galvatron, arXiv:2211.13878, section 3 (strategies by layer).
"""

import functools
from typing import NamedTuple

from meshpar.errors import LayoutError, nearest, shown
from meshpar.layouts import mixes
from meshpar.layouts.axes import FSDP, TENSOR

FEATURES, ROWS = TENSOR, FSDP
"""Uses: devices along `tensor` split the features, or the rows."""

_USES = (FEATURES, ROWS)


def canonical_layers(layers: str) -> str:
    """The value of `layers=`; neighbours of a mix that have one use are merged.

    Raises:
      LayoutError: a use that does not exist, or a mix that is malformed.
    """
    if layers in _USES:
        return layers
    if "*" in layers or "+" in layers:
        example = f"12*{FEATURES}+10*{ROWS}"
        return mixes.canonical_mix("layers", layers, _USES, "use", example)
    raise LayoutError(f"layers={shown(layers)!r} ({nearest(shown(layers), _USES)})")


def splits_rows(layers: str) -> bool:
    """Whether any layer gives devices along `tensor` rows of their own.

    Args:
      layers: a value of `layers=`.
    """
    return ROWS in dict(mixes.segments(layers, 1))


class Segment(NamedTuple):
    """Consecutive layers that run alike.

    Attributes:
      use: what they use `tensor` for.
      remat: their policy of rematerialization.
      count: number of layers.
    """

    use: str
    remat: str
    count: int


@functools.cache
def segments(layers: str, remat: str, depth: int) -> tuple[Segment, ...]:
    """Consecutive layers that run alike, in the order in which they run.

    Args:
      layers: a value of `layers=`.
      remat: a value of `remat=`.
      depth: number of layers of the stack; a mix of uses gives its own.
    """
    if mixes.is_mix(layers):
        depth = sum(count for _, count in mixes.terms(layers))
    uses, policies = (list(mixes.segments(v, depth)) for v in (layers, remat))
    found = []
    while uses and policies:
        (use, left), (policy, also_left) = uses.pop(0), policies.pop(0)
        count = min(left, also_left)
        found.append(Segment(use, policy, count))
        if left > count:
            uses.insert(0, (use, left - count))
        if also_left > count:
            policies.insert(0, (policy, also_left - count))
    return tuple(found)


@functools.cache
def policies(
    layers: str, remat: str, depth: int, use: str = FEATURES
) -> tuple[tuple[str, int], ...]:
    """(policy, number of layers) of the segments of one use.

    Takes the arguments of `segments`, and the use.
    """
    found = segments(layers, remat, depth)
    return tuple((s.remat, s.count) for s in found if s.use == use)


class Run(NamedTuple):
    """A segment, and how it meets its neighbours.

    Attributes:
      segment: the layers.
      enters: whether activations change from split features to split rows before it.
      exits: whether they change back after it.
    """

    segment: Segment
    enters: bool
    exits: bool

    @property
    def num_changes(self) -> int:
        """Number of times that activations change between the two uses."""
        return self.enters + self.exits


@functools.cache
def runs(layers: str, remat: str, depth: int) -> tuple[Run, ...]:
    """The segments of the stack; embedding and head around it split features.

    Takes the arguments of `segments`.
    """
    stack = segments(layers, remat, depth)
    uses = [FEATURES, *(segment.use for segment in stack), FEATURES]
    found = []
    for segment, before, after in zip(stack, uses, uses[2:], strict=False):
        own = segment.use == ROWS
        found.append(Run(segment, own and before != ROWS, own and after != ROWS))
    return tuple(found)
