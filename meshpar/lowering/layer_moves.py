"""Declares what a layer itself moves between devices, such as tokens to their experts.

One layer is traced on the shapes of one device's microbatch. The functions of `ops`
that move activations note what they move (`layouts.moves`).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, Params, abstract, abstract_layer
from meshpar.contracts.declared import DeclaredCollective
from meshpar.fsdp.terms import LayerPass
from meshpar.layouts.layer_uses import policies
from meshpar.layouts.moves import EMBEDDING, HEAD, Move
from meshpar.layouts.plan import partition_spec
from meshpar.layouts.remat import moves_again
from meshpar.lowering.batches import batch_specs
from meshpar.lowering.frame import Frame
from meshpar.lowering.repeated_moves import repeated
from meshpar.lowering.trained_layers import differentiates_layers, trains_all_outside


class Moves(NamedTuple):
    """What a model moves itself, for one microbatch.

    Attributes:
      layer: moves of one layer.
      outside: those of embedding and head.
      repeated: {mesh axes: bytes that one device sends at most} by collectives of the
        head that run once more, in loops and for rematerialization.
    """

    layer: list[Move]
    outside: list[Move]
    repeated: dict[tuple[str, ...], int]


class Runs(NamedTuple):
    """How often embedding and head run in one step.

    Attributes:
      embed: the embedding.
      embed_backward: its gradient.
      head: the head, both ways.
      embed_again: the embedding for its gradient, if that reads it.
    """

    embed: int
    embed_backward: int
    head: int
    embed_again: int = 0

    def of(self, move: Move) -> int:
        """Runs of a move, but those of `embed_again`."""
        if move.part == HEAD:
            return self.head
        return self.embed_backward if move.in_backward else self.embed


def traced_moves(frame: Frame, batch: Any) -> Moves:
    """What functions of `ops` move, in the order in which they are called.

    Args:
      frame: the shard_map program.
      batch: abstract batch of one replica.
    """
    num, layered = frame.layout.microbatches, frame.layered
    moves = Moves([], [], {})
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((x.shape[0] // num, *x.shape[1:]), x.dtype),
        batch,
    )
    shared, stack = layered.split(abstract(frame.plan.weights))
    specs = {path: partition_spec(held) for path, held in frame.held.items()}
    layer_specs = {path: PartitionSpec(*specs[path][1:]) for path in stack}

    def run(shared: Params, layer: Params, rows: Any) -> Array:
        with frame.scope() as scope:
            x = layered.embed(shared, rows, None)
            moves.outside.extend(_of_part(EMBEDDING, scope.moves))
            context = layered.context(shared, rows, None)
            scope.moves.clear()  # A cut model may have run layers to find their inputs.
            y = layered.layer(layer, x, None, context)
            moves.layer.extend(scope.moves)
            scope.moves.clear()
            head = jax.make_jaxpr(lambda *a: layered.head_loss(*a, rows, None).loss)
            moves.repeated.update(repeated(head(shared, y).jaxpr))
            moves.outside.extend(_of_part(HEAD, scope.moves))
        return jnp.zeros(())

    with jax.set_mesh(frame.mesh):
        if frame.manual_axes:
            run = jax.shard_map(
                run,
                in_specs=(
                    {path: specs[path] for path in shared},
                    layer_specs,
                    batch_specs(frame.layout, rows, frame.batch_axes),
                ),
                out_specs=PartitionSpec(),
                axis_names=set(frame.manual_axes),
            )
        jax.eval_shape(run, shared, abstract_layer(stack), rows)
    return moves


def _of_part(part: str, moves: Sequence[Move]) -> list[Move]:
    """The moves outside the layers, of the part in which they are."""
    return [move._replace(part=part) for move in moves if move.part]


def declared_moves(
    frame: Frame, passes: Iterable[LayerPass], moves: Iterable[Move]
) -> Iterator[DeclaredCollective]:
    """Declares the moves of all layers that split features, in one step.

    The backward pass moves gradients the other way; with rematerialization it moves
    again what it needs of the forward pass.

    Args:
      frame: the shard_map program.
      passes: all passes over the layers.
      moves: `traced_moves` of one layer.
    """
    passes, layout = list(passes), frame.layout
    for move in moves:
        runs = {False: 0, True: 0}
        for one in passes:
            optional = move.optional or _is_optional_again(one, move)
            for policy, depth in policies(layout.layers, layout.remat, one.depth):
                again = moves_again(policy, move.saved_as)
                if again or not move.when_repeated:
                    part = one._replace(depth=depth)
                    runs[optional] += one.runs * _runs_per_pass(part, move, again)
        for optional, count in runs.items():
            if not count:
                continue
            yield DeclaredCollective(
                move.kind,
                move.axes,
                move.group_size or frame.ways(move.axes),
                0 if move.bound else count * move.times,
                count * move.payload_bytes,
                move.why,
                bound=move.bound,
                gathers=optional,
                partial=move.group_size > 0,
            )


def declared_outside(
    frame: Frame, moves: Moves, runs: Runs, batch: Any
) -> Iterator[DeclaredCollective]:
    """Declares the moves of embedding and head in one step.

    Where the head alone is trained, a compiler may leave out all gradients; where a
    parameter outside the layers is not, those of the embedding.

    Args:
      frame: the shard_map program.
      moves: what the model moves itself.
      runs: of embedding and head.
      batch: abstract batch of one replica.
    """
    if not moves.outside:
        return
    unread = not differentiates_layers(frame, batch)
    unread_by_part = {HEAD: unread, EMBEDDING: unread or not trains_all_outside(frame)}

    def declare(move: Move, runs: int, may_drop: bool) -> DeclaredCollective:
        return DeclaredCollective(
            move.kind,
            move.axes,
            frame.ways(move.axes),
            0 if move.bound else runs * move.times,
            runs * move.payload_bytes,
            move.why,
            bound=move.bound,
            gathers=may_drop,
        )

    for move in moves.outside:
        may_drop = move.optional or (move.in_backward and unread_by_part[move.part])
        yield declare(move, runs.of(move), may_drop)
        if runs.embed_again and move.part == EMBEDDING and not move.in_backward:
            again = move._replace(why=f"{move.why}, again for its gradient")
            yield declare(again, runs.embed_again, True)
    for axes, size in moves.repeated.items():
        why, size = "a head that runs again, or in a loop", runs.head * size
        ways = frame.ways(axes)
        yield DeclaredCollective("any", axes, ways, 0, size, why, bound=True)


def _is_optional_again(layers: LayerPass, move: Move) -> bool:
    """Whether a pass that runs once more may leave out a move of its last layer."""
    unread = move.into_sublayer and not move.is_saved
    return unread and layers.name == "forward again"


def _runs_per_pass(layers: LayerPass, move: Move, again: bool) -> int:
    """How often one pass over layers runs a move; `again` says whether remat would."""
    if layers.name == "backward":
        repeated = move.is_saved and again
        return layers.depth * (move.in_backward or move.has_gradient + repeated)
    if move.in_backward:
        return 0
    if layers.name == "forward again" and layers.depth == 1 and not move.bound:
        # Nothing reads the output of a single layer, nor what is computed once more.
        return int((move.is_saved or move.into_sublayer) and not again)
    return layers.depth
