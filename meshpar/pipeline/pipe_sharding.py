"""Refuses tensors that `pipe` splits in a way that a pipeline cannot run.

`pipe` splits the first dim of the stack of layers and, with vocab=pipe, the vocabulary
of embedding and head.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.arrays import Array, Params, abstract, vary
from meshpar.errors import LayoutError
from meshpar.jaxprs.straight_line import used_inputs
from meshpar.layouts.axes import PIPE
from meshpar.layouts.plan import LeafPlan, Plan
from meshpar.layouts.scope import current_scope, unmarked_rows
from meshpar.metrics import LossResult
from meshpar.models.layer_stack import Key, LayeredModel


def check_parameters(layered: LayeredModel, plan: Plan) -> None:
    """Checks which dims of the parameters `pipe` splits.

    Raises:
      LayoutError: a parameter of the stack is not split by its first dim alone, or
        another parameter by a dim other than the vocabulary.
    """
    layout = plan.layout
    shared, stack = layered.split(plan.parameters)
    for path, leaf in stack.items():
        if leaf.spec[0] != (PIPE,) or PIPE in sum(leaf.spec[1:], ()):
            raise LayoutError(
                f"{path} {leaf.shape}: pipe={layout.pipe} splits the first dim of the "
                f"stack and nothing else, but its dims {leaf.names} split over "
                f"{leaf.spec}; name the first dim 'layers', and map no other one to "
                "pipe"
            )
    for path, leaf in shared.items():
        split = [
            name
            for name, axes in zip(leaf.names or (), leaf.spec, strict=False)
            if PIPE in axes
        ]
        if split and not (layout.splits_vocabulary and split == ["vocab"]):
            raise LayoutError(
                f"{path} {leaf.shape} splits {split} over {leaf.spec}: outside the "
                "stack of layers no dim may be mapped to pipe, but by vocab=pipe"
            )


def check_vocabulary(
    plan: Plan, head: Callable[[Params, Any], LossResult], shared: Params, y: Any
) -> None:
    """Checks that the head treats its slice of the vocabulary as a slice.

    Call it with vocab=pipe, inside shard_map. The head is traced once more, with
    slices as all that differs between stages.

    Args:
      plan: shapes and splits of the parameters.
      head: (weights of embedding and head, output of the last layer) -> the loss.
      shared: these weights.
      y: output of the last layer.

    Raises:
      LayoutError: a value depends on the logits of one slice alone, or a function of
        `vocabulary` was given a whole vocabulary.
    """
    differing: list[str] = []

    def trace() -> None:
        def same(x: Array, axes: tuple[str, ...] = ()) -> Array:
            return vary(jnp.zeros(x.shape, x.dtype), axes)

        weights = {
            path: same(x, (PIPE,) if _over_pipe(plan.weights[path]) else ())
            for path, x in shared.items()
        }
        with unmarked_rows():
            result = head(weights, jax.tree.map(same, y))
        for name, value in {"loss": result.loss, **result.aux}.items():
            types = (jax.typeof(jnp.asarray(x)) for x in jax.tree.leaves(value))
            if any(PIPE in kind.manual_axis_type.varying for kind in types):
                differing.append(name)

    jax.eval_shape(trace)
    if differing:
        raise LayoutError(
            f"vocab=pipe: {differing[0]} depends on the logits otherwise than through "
            "vocabulary.token_losses, and a stage has one slice of the logits; leave "
            f"{differing[0]} out, or use vocab=edge"
        )
    whole_sizes = {
        leaf.shape[dim]
        for leaf in plan.parameters.values()
        for dim, axes in enumerate(leaf.spec)
        if axes[:1] == (PIPE,) and leaf.names[dim] == "vocab"
    }
    stages = plan.layout.pipe
    for name, size in current_scope().vocabulary_used.items():
        if size * stages not in whole_sizes:
            slices = sorted(size // stages for size in whole_sizes)
            raise LayoutError(
                f"vocab=pipe: vocabulary.{name} saw {size} tokens on every stage, "
                f"but a slice has {slices}: name the vocab dim of embedding and head, "
                "and do not allow it to be whole"
            )


def checked_loss(
    plan: Plan,
    head_loss: Callable[[Params, Any, Any, Key], LossResult],
    shared: Params,
    y: Any,
    batch: Any,
    key: Key,
) -> LossResult:
    """The loss, where each stage has a slice of the head, after `check_vocabulary`.

    Args:
      plan: shapes and splits of the parameters.
      head_loss: that of the model.
      shared: weights of embedding and head.
      y: output of the last layer.
      batch: a microbatch.
      key: its random key.
    """

    def head(shared: Params, y: Any) -> LossResult:
        return head_loss(shared, y, batch, key)

    check_vocabulary(plan, head, shared, y)
    return head(shared, y)


def check_context(
    layered: LayeredModel, plan: Plan, shared: Params, batch: Any
) -> None:
    """Checks that what all layers read needs no slice of another stage.

    Call it with vocab=pipe, inside shard_map.

    Args:
      layered: the model.
      plan: shapes and splits of the parameters.
      shared: weights of embedding and head.
      batch: this device's part of the batch.

    Raises:
      LayoutError: `context` of the model reads an embedding.
    """
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    weights = abstract(shared)
    used = used_inputs(lambda w, b: layered.context(w, b, None), weights, rows)
    if read := sorted(path for path in used if _over_pipe(plan.weights[path])):
        raise LayoutError(
            f"vocab=pipe: context of the model reads {read[0]}, of which a stage has a "
            "slice, and stages run their layers on different microbatches; read it in "
            "embed, or use vocab=edge"
        )


def _over_pipe(leaf: LeafPlan) -> bool:
    """Whether stages hold slices of a weight."""
    return any(PIPE in axes for axes in leaf.spec)
