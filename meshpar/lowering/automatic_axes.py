"""Bounds on what compilers move over automatic axes, for models and optimizers."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from meshpar.arrays import num_bytes
from meshpar.contracts import cost
from meshpar.contracts.declared import DeclaredCollective
from meshpar.fsdp.terms import LayerPass, weight_reading
from meshpar.jaxprs.reach import Reach
from meshpar.layouts.axes import in_use
from meshpar.layouts.layer_uses import policies
from meshpar.layouts.remat import NONE
from meshpar.lowering.frame import Frame
from meshpar.ops.tensor_split import INTO

_SUBLAYERS = 2
_FORWARD, _BACKWARD, _OUTSIDE = 3, 8, 24
"""Gathers of activations that one sublayer, and embedding with head, may cost.

Megatron's sequence parallelism needs a gather before and a reduce_scatter after each
sublayer. A compiler may reduce whole activations (twice the bytes), and in the backward
pass once for each of up to three projections that read the same input.
"""

_ENDS = {
    "activations of the embedding": "embedding",
    "activations of the head": "head",
    "sums, over slices of the vocabulary": "head",
}
"""{purpose of what embedding and head move by hand: which of them}."""

_NUM_ENDS = 2


def declared_bounds(
    frame: Frame,
    batch: Any,
    passes: Sequence[LayerPass],
    written: Sequence[DeclaredCollective],
) -> Iterator[DeclaredCollective]:
    """A bound on the collectives over the axes that the compiler handles.

    What the step writes itself (`ops.tensor_parallel`) is declared exactly.

    Args:
      frame: the shard_map program.
      batch: abstract batch of one replica.
      passes: all passes over the layers.
      written: the collectives that the step writes.
    """
    manual = (*frame.manual_axes, *frame.replica_axes)
    sizes = frame.mesh.shape
    axes = tuple(axis for axis in in_use(sizes, sizes) if axis not in manual)
    if not axes:
        return
    ways, size = frame.ways(axes), frame.activation_bytes(batch)
    unit = cost.wire_bytes("all_gather", size, ways)
    ends = [t for t in written if t.why in _ENDS]
    by_hand = sublayers_by_hand(passes, written)
    parts = {_ENDS[term.why] for term in ends}
    automatic = _OUTSIDE * (_NUM_ENDS - len(parts)) // _NUM_ENDS
    units, sublayers = 0, max(0, _SUBLAYERS * frame.layered.pattern - by_hand)
    for name, runs, depth, _ in weight_reading(passes):
        gathers = _FORWARD * depth
        if name == "backward":
            own = policies(frame.layout.layers, frame.layout.remat, depth)
            again = sum(count for policy, count in own if policy != NONE)
            gathers = _BACKWARD * depth + _FORWARD * again
        units += runs * sublayers * gathers
        units += runs * automatic // 2
    why = f"activations: at most {units} gathers of {unit:.0f} bytes"
    total = units * unit
    if by_hand or ends:
        runs = max((term.count for term in ends), default=0)
        total += _whole_weights(frame, batch, axes, passes, runs)
        why = f"{why}, and gradients of weights that these axes do not split"
    yield DeclaredCollective("any", axes, ways, 0, int(total), why, bound=True)


def sublayers_by_hand(
    passes: Sequence[LayerPass], written: Sequence[DeclaredCollective]
) -> int:
    """Sublayers of one layer whose way in and out the step writes itself.

    Args:
      passes: all passes over the layers.
      written: the collectives that the step writes.
    """
    gathers = sum(
        term.count / (term.group_size - 1 if term.kind == "permute" else 1)
        for term in written
        if term.why == INTO
    )
    forward = (run for run in weight_reading(passes) if run.name != "backward")
    layers = sum(run.runs * run.depth for run in forward)
    return round(gathers / layers) if layers else 0


def _whole_weights(
    frame: Frame,
    batch: Any,
    axes: tuple[str, ...],
    passes: Sequence[LayerPass],
    runs: int,
) -> float:
    """Bytes sent for weights that axes do not split, beside others that they do.

    That is their gradients, and the results of the layers' matmuls with them, which may
    have to be as those of other matmuls.

    Args:
      frame: the shard_map program.
      batch: abstract batch of one replica.
      axes: the automatic axes.
      passes: all passes over the layers.
      runs: how often embedding and head run; 0 to leave out their weights.
    """
    shared, stack = (
        [
            leaf
            for path, leaf in leaves.items()
            if not frame.shardings[path].automatic_axes & set(axes)
        ]
        for leaves in frame.layered.split(frame.plan.weights)
    )
    layers = sum(run.runs * run.depth for run in passes if run.name == "backward")
    total = runs * sum(4 * math.prod(leaf.shape) for leaf in shared)
    total += layers * sum(4 * math.prod(leaf.shape[1:]) for leaf in stack)
    x = frame.activations(batch)[0]
    rows = num_bytes(x) / x.shape[-1]
    matrices = (leaf.shape[2:] for leaf in stack if len(leaf.shape) > 2)
    results = sum(rows * math.prod(shape) for shape in matrices)
    return cost.wire_bytes("all_reduce", total, frame.ways(axes)) + layers * 2 * results


def optimizer_bounds(
    axes: tuple[str, ...], ways: int, number: int, reach: Reach
) -> Iterator[DeclaredCollective]:
    """Bounds the traffic that a compiler adds for the global norm and the optimizer.

    Args:
      axes: all axes of one replica that are in use.
      ways: devices along them.
      number: of gradients.
      reach: of the optimizer.
    """
    size = 8 * number
    norm = "all_reduce", axes, ways, 0, size, "global norm"
    yield DeclaredCollective(*norm, bound=True)
    if reach.moves:
        why = "optimizer: not elementwise, the compiler chooses"
        yield DeclaredCollective("any", axes, ways, 0, math.inf, why, bound=True)
    elif reach.reduced_bytes:
        # A compiler may reduce axis by axis, and together with the global norm.
        wire = cost.wire_bytes("all_reduce", size + 2 * reach.reduced_bytes, ways)
        why = "global norm, and the optimizer's reductions over tensors"
        yield DeclaredCollective("any", axes, ways, 0, int(wire), why, bound=True)
