"""`verify`: a program against the training loop that its user wrote."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.errors import MeshparError
from meshpar.explain.judge import moved_by_rounding
from meshpar.explain.verify import Group, VerifyReport, compare, weight_groups
from meshpar.lowering.given_params import flat_params
from meshpar.lowering.train_program import TrainProgram
from meshpar.models.model import Model
from meshpar.replicated import unmarked

Step = Callable[[Any, Any, Any], tuple[Any, Any, Any]]
"""(parameters, optimizer state, batch) -> (parameters, optimizer state, loss)."""


def verify(
    program: TrainProgram,
    step: Step,
    params: Any,
    batches: Iterable[Any],
    *,
    optimizer_state: Any = None,
    tolerance: float = 1e-5,
) -> VerifyReport:
    """Trains a program beside a loop of your own, and compares losses and weights.

    The loop is plain jax and optax on one device, without meshpar. It runs twice, the
    second time from weights that are moved by one rounding: what rounding alone makes
    of a weight is no difference.

    Args:
      program: the program, from `lower`.
      step: one step of your loop: (params, optimizer state, batch) -> (params,
        optimizer state, loss).
      params: the parameters at the start, in your own tree: an NNX module's state or
        pure dict, Linen variables, nested dicts or {path: array}.
      batches: host batches, one per step.
      optimizer_state: your optimizer's state at the start; by default that of the
        program's optimizer for `params`.
      tolerance: largest relative error of a loss, or of what a weight has changed since
        the start.

    Returns:
      The report; print it. It says EQUAL, or the first step, tensor and layer that
      differ, with both values.

    Raises:
      MeshparError: a model was given, not a program; the program trains with stale
        weights, or in several processes; or your loop has a parameter that the program
        does not have.
    """
    if isinstance(program, Model):
        raise MeshparError("verify takes a program: give that of meshpar.lower")
    if program.reason_not_equal:
        raise MeshparError(program.reason_not_equal)
    if jax.process_count() > 1:
        raise MeshparError("verify compares with one device: run it in one process")
    if optimizer_state is None:
        optimizer_state = program.lowering.optimizer.transformation.init(params)
    state, comparisons = program.init(0, params), []
    # Copies, as a step of the loop may donate what it gets.
    own = jax.tree.map(jnp.copy, (params, optimizer_state))
    moved = jax.tree.map(moved_by_rounding, params), own[1]
    moved = jax.tree.map(jnp.copy, moved)
    start = flat_params(jax.device_get(params))
    for number, batch in enumerate(batches, start=1):
        *own, loss = step(*own, unmarked(batch))
        *moved, _ = step(*moved, unmarked(batch))
        state, metrics = program.step(state, batch)
        found = {"loss": {"": np.asarray(metrics["loss"])}}
        found["weight"] = jax.device_get(program.weights(state))
        weights, others = (flat_params(jax.device_get(x[0])) for x in (own, moved))
        if unknown := sorted(weights.keys() - found["weight"].keys()):
            raise MeshparError(
                f"your loop trains {unknown[0]}, which the program does not have; it "
                f"has {', '.join(sorted(found['weight'])[:5])}, ..."
            )
        loss = Group("loss", {"": np.asarray(loss)})
        for group in (loss, *weight_groups(weights, others, start)):
            comparisons += compare(number, found[group.kind], group, tolerance)
    return VerifyReport(tuple(comparisons), tuple(program.violations()), "your loop")
