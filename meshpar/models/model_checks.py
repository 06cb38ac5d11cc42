"""Checks of a model under a layout, by traces of its loss, before it is compiled."""

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from meshpar import compat
from meshpar.arrays import abstract
from meshpar.errors import LayoutError, nearest
from meshpar.jaxprs.walk import equations
from meshpar.layouts.axes import BATCH_AXES, REPLICA, TENSOR
from meshpar.layouts.layer_uses import splits_rows
from meshpar.layouts.layout import Layout
from meshpar.layouts.remat import check_marks
from meshpar.layouts.row_draws import Draws
from meshpar.layouts.scope import Scope
from meshpar.models.foreign_shardings import check_divides
from meshpar.models.length_check import check_positions
from meshpar.models.model import Model
from meshpar.models.model_scope import model_scope
from meshpar.models.row_check import (
    Split,
    averaged_state,
    check_callbacks,
    check_draws,
    check_losses,
)
from meshpar.replicated import num_rows


def check_step(model: Model, scope: Scope, jaxpr: Any, by_hand: bool) -> None:
    """Holds a layout to the names that the model used in a step.

    Args:
      model: the model.
      scope: in which the step was traced.
      jaxpr: of the step.
      by_hand: whether each device sees its part of the batch alone (shard_map).

    Raises:
      LayoutError: a rule or an option that the model does not honour, or a call of
        Python from a device's part of the program.
    """
    layout = scope.layout
    check_divides(jaxpr, scope)
    of_params = [name for p in model.params.values() for name in p.names or ()]
    known = {part for x in of_params for part in (x if isinstance(x, tuple) else [x])}
    known |= scope.names_used
    for name, _ in layout.axes:
        if name not in known:
            raise LayoutError(
                f"axes.{name}: the model has no mesh axis of that name "
                f"({nearest(name, (n for n in known if n))}); leave it out"
            )
    for name, _ in layout.activations:
        if name not in scope.names_used:
            known = nearest(name, (n for n in scope.names_used if n))
            raise LayoutError(
                f"rule activations.{name} matches no dim that the model constrains "
                f"({known})"
            )
    if layout.splits_vocabulary and len(scope.vocabulary_used) < 2:
        raise LayoutError(
            "vocab=pipe: the model has to use vocabulary.lookup for its embedding and "
            "vocabulary.token_losses or vocabulary.head_losses for its loss "
            "(meshpar.ops.vocabulary)"
        )
    # Runners rematerialize the layers that they run.
    has_layers = by_hand and bool(model.layered.split(model.params)[1])
    marked = scope.remat_used or has_layers
    check_marks(layout.remat, jaxpr, marked, scope.remat_outside)
    if _runs_on_shards(layout, by_hand):
        check_callbacks(jaxpr)
    if not by_hand:
        check_grouped_convolutions(layout, jaxpr.jaxpr)


def check_grouped_convolutions(layout: Layout, jaxpr: Any) -> None:
    """Refuses gradients of grouped convolutions that XLA's partitioner adds up wrongly.

    Where the batch is split over some axes of a mesh and not over others, it adds up
    the gradient of the kernel over all of them (jaxlib 0.10 and 0.12).

    Args:
      layout: of a step whose collectives the compiler writes.
      jaxpr: of the step.

    Raises:
      LayoutError: the step has such a gradient.
    """
    others = {a: n for a, n in layout.sizes.items() if a not in BATCH_AXES and n > 1}
    if not others or math.prod(layout.sizes[axis] for axis in BATCH_AXES) == 1:
        return
    for eqn in equations(jaxpr):
        if eqn.params.get("batch_group_count", 1) > 1:
            place, axes = compat.user_line(eqn), " and ".join(others)
            raise LayoutError(
                f"a convolution has feature groups{place and f', at {place}'}, and "
                "XLA multiplies the gradient of its kernel by the devices along "
                f"{axes}, over which lowering=jit does not split the batch: leave "
                f"{axes} out, or name the layers (layers=...) for lowering=shard_map"
            )


def _runs_on_shards(layout: Layout, by_hand: bool) -> bool:
    """Whether each device has a part of the batch or of the layers (shard_map)."""
    return by_hand and layout.num_devices > layout.tensor


class CheckedParts(NamedTuple):
    """The facts of a loss that parts of a batch need.

    Attributes:
      averaged: paths of the state that parts average.
      draws: which random numbers belong to rows.
    """

    averaged: frozenset[str] = frozenset()
    draws: Draws = Draws()


def check_parts(
    model: Model, layout: Layout, mesh: Mesh, by_hand: bool, batch: Any
) -> CheckedParts:
    """Checks the loss of evaluation, and the losses of a split batch.

    Args:
      model: the model.
      layout: the layout.
      mesh: the device mesh.
      by_hand: whether each device sees its part of the batch alone (shard_map).
      batch: abstract batch of all replicas.

    Raises:
      LayoutError: a loss or metric that the parts of a split batch cannot give.
      MeshparError: the loss of evaluation needs a random key, or does not call its
        layers one after the other.
    """
    axes, evaluates = {REPLICA}, layout.pipe > 1 or layout.replica > 1
    if by_hand:
        check_positions(model, batch, layout, evaluates)
        axes.update(BATCH_AXES)
        axes.update((TENSOR,) if splits_rows(layout.layers) else ())
    splits = {axis: n for axis, n in layout.sizes.items() if axis in axes and n > 1}
    if layout.microbatches > 1:
        splits["microbatches"] = layout.microbatches
    if not splits:
        _check_evaluation(model, layout, mesh, batch)
        return CheckedParts()
    on_shards = _runs_on_shards(layout, by_hand)
    found = check_losses(model, batch, Split.by(splits), evaluates, on_shards)
    if not evaluates and (found.reads_key or model.evaluates_apart):
        _check_evaluation(model, layout, mesh, batch)
    averaged: frozenset[str] = frozenset()
    if (num := layout.microbatches) > 1:
        averaged = averaged_state(found.state, Split.by({"microbatches": num}))
    if (drawn := found.drawn) is None:
        return CheckedParts(averaged)
    rows = num_rows(batch)
    own = {axis: num for axis, num in splits.items() if axis != TENSOR}
    for parts in (own, splits, *([{"microbatches": num}] if num > 1 else [])):
        check_draws(drawn, rows, Split.by(parts))
    draws = Draws(frozenset(drawn.rows), frozenset(drawn.keys))
    return CheckedParts(averaged, draws)


def _check_evaluation(model: Model, layout: Layout, mesh: Mesh, batch: Any) -> None:
    """Traces the loss of evaluation, where no check of its rows does.

    A loss that reads no key runs as in training.

    Raises:
      MeshparError: it needs a random key, or its layers cannot be taken out.
    """
    params, layered = abstract(model.params), model.layered
    with jax.set_mesh(mesh), model_scope(layout, mesh):
        if layered is not None and layered.evaluates:
            jax.eval_shape(layered.embed, params, batch, None)
        if model.asks_for_key:
            jax.eval_shape(model.evaluation_loss, params, batch)
