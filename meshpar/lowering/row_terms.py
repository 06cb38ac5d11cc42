"""Formula and bounds of layers that split rows over `tensor` (`row_layers`)."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from meshpar.arrays import num_bytes
from meshpar.contracts import cost
from meshpar.contracts.declared import DeclaredCollective
from meshpar.fsdp.terms import (
    LayerPass,
    declare_all_reduces,
    declared_gathers,
    declared_scatters,
)
from meshpar.fsdp.zero import Zero
from meshpar.layouts.axes import TENSOR
from meshpar.lowering.frame import Frame
from meshpar.lowering.row_layers import OVER_ROWS, OVER_TENSOR, length_dim
from meshpar.models.row_dims import RowDims


def declared_weights(
    frame: Frame, zero: Zero, passes: list[LayerPass], counts: Sequence[int]
) -> Iterator[DeclaredCollective]:
    """Moves of weights and gradients in one step.

    Args:
      frame: the shard_map program around the layers.
      zero: the policy of these layers.
      passes: all passes over them.
      counts: number of layers of each segment.
    """
    rows, sizes = frame.over_rows, frame.mesh.shape
    stack = frame.layered.split(rows.stage_weights())[1]
    trained = frame.plan.trained(stack)
    yield from declared_gathers(zero, stack, sizes, passes)
    yield from declared_scatters(zero, trained, trained, sizes, passes)
    dtype = "float32" if frame.transports.widens else None
    stack = frame.layered.split(rows.stage_shards(dtype))[1]
    whole = {
        path: x
        for path, x in frame.plan.trained(stack).items()
        if TENSOR in zero.shardings[path].rest
    }
    why, runs = (
        OVER_ROWS,
        frame.layout.microbatches,
    )
    shardings = dict.fromkeys(whole, OVER_TENSOR)
    for count in counts:
        shards = {p: x.update(shape=(count, *x.shape[1:])) for p, x in whole.items()}
        for term in declare_all_reduces(shards, shardings, sizes, why):
            count, size = runs * term.count, runs * term.payload_bytes
            yield dataclasses.replace(term, count=count, payload_bytes=size)


def bounded_exchanges(
    frame: Frame, dims: RowDims, changes: int, batch: Any
) -> Iterator[DeclaredCollective]:
    """Bounds the compiler's traffic between these layers and others, in one step.

    Activations whose length no axis splits are whole between layers.

    Args:
      frame: the shard_map program around the layers.
      dims: where activations hold rows.
      changes: number of places where activations change.
      batch: abstract batch of one replica.
    """
    ways, runs = frame.layout.tensor, changes * frame.layout.microbatches
    pairs = zip(frame.activations(batch), jax.tree.leaves(dims.x), strict=True)
    for x, dim in pairs:
        if length_dim(frame, x.shape, dim) is None:
            wire = round(2 * runs * cost.wire_bytes("all_gather", num_bytes(x), ways))
            why = "activations, between split rows and whole ones"
            yield DeclaredCollective("any", (TENSOR,), ways, 0, wire, why, bound=True)
