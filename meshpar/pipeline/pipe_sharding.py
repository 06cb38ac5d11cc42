"""Refuses tensors that `pipe` splits in a way that a pipeline cannot run.

`pipe` splits the first dim of the stack of layers and, with vocab=pipe, the vocabulary
of embedding and head.
"""

import jax
import jax.numpy as jnp

from meshpar.errors import LayoutError
from meshpar.layouts.axes import PIPE
from meshpar.layouts.plan import Plan
from meshpar.layouts.scope import current_scope
from meshpar.models.layer_stack import LayeredModel
from meshpar.models.metrics import LossResult


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


def check_vocabulary(plan: Plan, result: LossResult) -> None:
    """Checks that the head treats its slice of the vocabulary as a slice.

    Call it with vocab=pipe, while the loss is traced inside shard_map.

    Args:
      plan: shapes and splits of the parameters.
      result: loss and metrics.

    Raises:
      LayoutError: a value depends on the logits of one slice alone, or a function of
        `vocabulary` was given a whole vocabulary.
    """
    values = {"loss": result.loss, **result.aux}
    for name, value in values.items():
        types = (jax.typeof(jnp.asarray(x)) for x in jax.tree.leaves(value))
        if any(PIPE in kind.manual_axis_type.varying for kind in types):
            raise LayoutError(
                f"vocab=pipe: {name} depends on the logits otherwise than through "
                "vocabulary.token_losses, and a stage has one slice of them; leave "
                "that out, or use vocab=edge"
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
