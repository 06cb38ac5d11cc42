"""Bounds on what a compiler moves over the axes that are automatic inside shard_map."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from meshpar.contracts import cost
from meshpar.contracts.declared import DeclaredCollective
from meshpar.fsdp.terms import LayerPass
from meshpar.layouts.axes import in_use
from meshpar.layouts.layer_uses import policies
from meshpar.layouts.remat import NONE
from meshpar.lowering.frame import Frame
from meshpar.lowering.layer_moves import Moves, Runs

_SUBLAYERS = 2
_FORWARD, _BACKWARD, _OUTSIDE = 3, 8, 24
"""Gathers of activations that one sublayer, and embedding with head, may cost.

Megatron's sequence parallelism needs a gather before and a reduce_scatter after each
sublayer. A compiler may reduce whole activations (twice the bytes), and in the backward
pass once for each of up to three projections that read the same input.
"""


def declared_bounds(
    frame: Frame,
    batch: Any,
    passes: Sequence[LayerPass],
    moves: Moves,
    outside: Runs,
    declared: Sequence[DeclaredCollective],
) -> Iterator[DeclaredCollective]:
    """A bound on the collectives over the axes that the compiler handles.

    What sublayers move by hand (`ops.tensor_parallel`) is declared exactly elsewhere.

    Args:
      frame: the shard_map program.
      batch: abstract batch of one replica.
      passes: all passes over the layers.
      moves: what the model moves itself.
      outside: runs of embedding and head.
      declared: the same for all layers; bounds over these axes are added.
    """
    manual = (*frame.manual_axes, *frame.replica_axes)
    sizes = frame.mesh.shape
    axes = tuple(axis for axis in in_use(sizes, sizes) if axis not in manual)
    if not axes:
        return
    ways, size = frame.ways(axes), frame.activation_bytes(batch)
    unit = cost.wire_bytes("all_gather", size, ways)
    ends = [
        m for m in moves.layer if m.into_sublayer and not (m.bound or m.in_backward)
    ]
    by_hand = len(ends) // 2  # Each sublayer has a way in and a way out.
    parts = {move.part for move in moves.outside}
    automatic = _OUTSIDE * (2 - len(parts)) // 2
    units, sublayers = 0, max(0, _SUBLAYERS * frame.layered.pattern - by_hand)
    for name, runs, depth, _ in passes:
        gathers = _FORWARD * depth
        if name == "backward":
            own = policies(frame.layout.layers, frame.layout.remat, depth)
            again = sum(count for policy, count in own if policy != NONE)
            gathers = _BACKWARD * depth + _FORWARD * again
        units += runs * sublayers * gathers
        units += runs * automatic // 2
    why = f"activations: at most {units} gathers of {unit:.0f} bytes"
    total = units * unit
    if by_hand or parts:
        runs = max(map(outside.of, moves.outside), default=0)
        total += _whole_gradients(frame, axes, passes, runs)
        why = f"{why}, and gradients of weights that these axes do not split"
    own = (term for term in declared if term.bound and set(term.axes) <= set(axes))
    if rest := sum(term.wire_bytes for term in own):
        total, why = total + rest, f"{why}, and what layers move themselves"
    yield DeclaredCollective("any", axes, ways, 0, int(total), why, bound=True)


def _whole_gradients(
    frame: Frame, axes: tuple[str, ...], passes: Sequence[LayerPass], runs: int
) -> float:
    """Bytes sent for the gradients of weights that axes do not split.

    Args:
      frame: the shard_map program.
      axes: the automatic axes.
      passes: all passes over the layers.
      runs: how often embedding and head run; 0 to leave out their weights.
    """
    shared, stack = (
        sum(
            4 * math.prod(leaf.shape)
            for path, leaf in leaves.items()
            if not frame.shardings[path].automatic_axes & set(axes)
        )
        for leaves in frame.layered.split(frame.plan.weights)
    )
    layers = sum(run.runs * run.depth for run in passes if run.name == "backward")
    total = runs * shared + layers * stack // frame.layered.depth
    return cost.wire_bytes("all_reduce", total, frame.ways(axes))
