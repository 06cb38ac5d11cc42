"""Large-batch rules: how the rate of SGD follows the batch, warm-up, LARS and LAMB.

Source: Goyal et al., Accurate, Large Minibatch SGD, arXiv:1706.02677 (linear scaling
  and gradual warm-up); Krizhevsky, arXiv:1404.5997 (root scaling); You, Gitman,
  Ginsburg, arXiv:1708.03888 (LARS); You et al., arXiv:1904.00962 (LAMB).
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
import optax

from meshpar.arrays import Array
from meshpar.errors import MeshparError

Schedule = Callable[[Array], Array]
"""Number of steps done -> rate."""


def linear(rate: float, batch: int, base: int) -> float:
    """The rate for a batch, in proportion to its rows; `rate` is that of `base` rows.

    A step of k times the rows goes as far as k steps, as long as gradients hardly
    change on the way.
    """
    _check(rate, batch, base)
    return rate * batch / base


def root(rate: float, batch: int, base: int) -> float:
    """The rate for a batch, by the root of its rows: the noise of a step stays."""
    _check(rate, batch, base)
    return rate * math.sqrt(batch / base)


def warmed_up(rate: float | Array, steps: float | Array, start: float = 0) -> Schedule:
    """A rate that grows linearly from `start` over so many steps, and then stays."""

    def schedule(step: Array) -> Array:
        share = jnp.minimum(1.0, (step + 1) / jnp.maximum(steps, 1))
        return start + (rate - start) * share

    return schedule


def lars(
    rate: optax.ScalarOrSchedule, trust: float = 1e-3, momentum: float = 0.9
) -> optax.GradientTransformation:
    """SGD with momentum whose step in each tensor is trust * |w| / |g| times as long.

    Args:
      rate: of all tensors.
      trust: how far a tensor goes in a step, as a share of its norm.
      momentum: of the scaled steps.
    """
    return optax.lars(
        rate, weight_decay=0.0, trust_coefficient=trust, momentum=momentum
    )


def lamb(rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Adam whose step in each tensor has the length of the tensor, times the rate."""
    return optax.lamb(rate)


def _check(rate: float, batch: int, base: int) -> None:
    if batch < 1 or base < 1 or rate <= 0:
        raise MeshparError(
            f"rate={rate} of base={base} rows for batch={batch}: all must be positive"
        )
