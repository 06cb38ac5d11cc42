"""Server-side updates by optax: pushes are gradients of an elementwise optimizer."""

from typing import Any

import jax
import numpy as np
import optax

from meshpar.errors import MeshparError
from meshpar.islands.key_range import Contribution
from meshpar.islands.rules import UpdateFunction
from meshpar.lowering.optimizer import make_optimizer


def optax_update(optimizer: optax.GradientTransformation) -> UpdateFunction:
    """The update that applies an optax optimizer to the gradients that are pushed.

    Sparse gradients are zero at all other keys, whose moments decay as well.

    Args:
      optimizer: an optimizer that updates each number by itself, because every range
        is updated alone.
    """

    @jax.jit
    def step(gradient, state, values):
        changes, state = optimizer.update(gradient, state, values)
        return optax.apply_updates(values, changes), state

    def update(
        values: np.ndarray, state: dict[str, np.ndarray], pushed: Contribution
    ) -> None:
        gradient = pushed.values
        if pushed.keys is not None:
            gradient = np.zeros_like(values)
            gradient[pushed.keys] = pushed.values
        start = optimizer.init(values)
        leaves, structure = jax.tree.flatten(start)
        if state:
            leaves = [state[str(i)] for i in range(len(leaves))]
        new, after = step(gradient, jax.tree.unflatten(structure, leaves), values)
        values[:] = np.asarray(new)
        for i, leaf in enumerate(jax.tree.leaves(after)):
            state[str(i)] = np.array(leaf)

    return update


def _check_elementwise(optimizer: optax.GradientTransformation) -> None:
    """Raises MeshparError for an optimizer that mixes numbers or draws random ones."""
    values = {"values": jax.ShapeDtypeStruct((8,), np.float32)}
    reach = make_optimizer(optimizer, values, {"values": ("values",)}).reach
    if not reach.elementwise or reach.positional:
        why = "draws random numbers" if reach.elementwise else "looks at whole tensors"
        raise MeshparError(
            "update: a store updates every key range by itself, and the optimizer "
            f"{why}; use an elementwise one, such as optax.adagrad"
        )


def as_update(update: Any) -> UpdateFunction | dict[str, UpdateFunction]:
    """A server-side update from an optax optimizer, a function, or a dict of them.

    Raises:
      MeshparError: anything else, or an optimizer whose update of a number depends on
        others: a store updates every range of them alone.
    """
    if isinstance(update, optax.GradientTransformation):
        _check_elementwise(update)
        return optax_update(update)
    if callable(update):
        return update
    if isinstance(update, dict):
        return {name: as_update(part) for name, part in update.items()}
    raise MeshparError(
        f"update={update!r}: use an optax optimizer or a function (values, state, "
        "contribution) that changes values and state in place"
    )
