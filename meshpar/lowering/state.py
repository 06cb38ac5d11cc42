"""The training state."""

from typing import Any, NamedTuple

import jax

from meshpar.arrays import Params

Metrics = dict[str, jax.Array]


class TrainState(NamedTuple):
    """All that training carries from step to step.

    Attributes:
      step: steps done, int32 scalar.
      seed: seed of the run, uint32 scalar; dropout keys follow from seed and step.
      params: {path: array}, the master weights.
      optimizer_state: the optax state.
    """

    step: jax.Array
    seed: jax.Array
    params: Params
    optimizer_state: Any

    def key(self) -> jax.Array:
        """The random key of this step."""
        return jax.random.fold_in(
            jax.random.key(self.seed, impl="threefry2x32"), self.step
        )
