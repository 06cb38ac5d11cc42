"""Transformations of optax that training cannot follow, refused with a remedy."""

import re
from typing import Any

import jax
import optax

from meshpar.arrays import other_leaf
from meshpar.errors import MeshparError


def refuse_lookahead(state: Any) -> None:
    """Refuses optax.lookahead, whose parameters are pairs of weights."""

    def is_lookahead(node: Any) -> bool:
        return isinstance(node, optax.LookaheadState)

    if any(map(is_lookahead, jax.tree.leaves(state, is_leaf=is_lookahead))):
        raise MeshparError(
            "optax.lookahead trains pairs of fast and slow weights "
            "(optax.LookaheadParams), and a model has one set of weights: use its fast "
            "optimizer, and meshpar.with_ema for weights that change slowly"
        )


def missing_arguments(error: TypeError) -> MeshparError | None:
    """The error of an update that lacks arguments; None if it is another error."""
    _, found, names = str(error).partition(" argument")
    if not found or "missing" not in str(error):
        return None
    missing = re.findall(r"'(\w+)'", names)
    remedy = "use an optimizer that does without"
    if "value_fn" in missing:
        remedy = "use one without a line search, as optax.lbfgs(..., linesearch=None)"
    elif "value" in missing:
        remedy = (
            "a wrapper drops these two; make it a GradientTransformationExtraArgs of "
            "optax (give an optax.MultiSteps itself)"
        )
    return MeshparError(
        f"the optimizer's update needs {', '.join(missing)}, and training gives it "
        f"the loss (value) and the gradients (grad) as extra arguments: {remedy}"
    )


def check_state(before: Any, after: Any) -> None:
    """Refuses a state that does not keep its structure, shapes and dtypes."""
    if found := other_leaf(after, before):
        path, new, old = found
        raise MeshparError(
            f"the optimizer's state {path} is {old} before an update and {new} after "
            "it; use an optimizer whose state keeps its form"
        )
