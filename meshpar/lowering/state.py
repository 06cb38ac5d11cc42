"""The training state, and the dtype in which a step computes."""

from typing import Any, NamedTuple

import jax

from meshpar.arrays import Array, Params
from meshpar.layouts.plan import Plan
from meshpar.models.model import STEP

Metrics = dict[str, Array]
"""Scalars by name."""


class TrainState(NamedTuple):
    """All that training carries from step to step.

    Attributes:
      step: steps done, int32 scalar.
      seed: seed of the run, uint32 scalar; dropout keys follow from seed and step.
      params: {path: array}, the master weights.
      optimizer_state: the optax state.
    """

    step: Array
    seed: Array
    params: Params
    optimizer_state: Any

    def after_step(self, params: Params, optimizer_state: Any) -> "TrainState":
        """The state after a step that gave these variables."""
        step = self.step + 1
        if STEP in params:
            params = {**params, STEP: step}
        return TrainState(step, self.seed, params, optimizer_state)

    def key(self) -> Array:
        """The random key of this step."""
        return jax.random.fold_in(
            jax.random.key(self.seed, impl="threefry2x32"), self.step
        )


def cast_params(params: Params, plan: Plan) -> Params:
    """Parameters in the dtype in which the loss computes with them."""
    return {path: x.astype(plan.weights[path].dtype) for path, x in params.items()}
