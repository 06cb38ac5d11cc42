"""The outer optimizer, which moves the global weights.

Every replica runs it on its own pieces of the weights, so it has to be elementwise.
"""

import jax
import jax.numpy as jnp
import optax

from meshpar.errors import StalenessError
from meshpar.local_sgd.merges import Elastic
from meshpar.local_sgd.mode import LocalSGD
from meshpar.lowering.optimizer import make_optimizer


def outer_optimizer(mode: LocalSGD, replicas: int) -> optax.GradientTransformation:
    """The optimizer that moves the global weights, without damping.

    Args:
      mode: the mode.
      replicas: R.

    Raises:
      MeshparError: `mode.outer` needs what a synchronization does not give it.
      StalenessError: it is not elementwise; or an elastic pull is too strong for so
        many replicas.
    """
    if not isinstance(mode.merge, Elastic):
        if mode.outer is not None:
            _check_elementwise(mode.outer)
        return mode.outer or optax.sgd(1.0)
    beta = replicas * mode.merge.alpha
    if beta > 1:
        raise StalenessError(
            f"Elastic({mode.merge.alpha}) with replica={replicas}: replicas * alpha"
            f" = {beta:g} moves the center beyond the average; use at most "
            f"{1 / replicas:g}"
        )
    return optax.sgd(beta)


def _check_elementwise(outer: optax.GradientTransformation) -> None:
    """Refuses optimizers that cannot run on pieces of the weights."""
    pieces = {"piece": jax.ShapeDtypeStruct((2,), jnp.float32)}
    reach = make_optimizer(outer, pieces, {"piece": ("piece",)}).reach
    for reason, holds in (
        ("an update of this one depends on other elements", not reach.elementwise),
        ("this one draws random numbers, the same for every piece", reach.positional),
        ("this one uses the loss, which a synchronization has not", reach.uses_loss),
    ):
        if holds:
            raise StalenessError(
                "LocalSGD(outer=...): each replica runs the outer optimizer on pieces "
                f"of the weights, and {reason}; use an elementwise optimizer, such as "
                "optax.sgd with momentum"
            )
