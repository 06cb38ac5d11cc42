"""Exponential moving average of the weights (Polyak averaging), kept by the optimizer.

    ema = decay * ema + (1 - decay) * params, after every update

It is a part of the optimizer state, so it is sharded as the parameters are and saved in
checkpoints.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from meshpar.arrays import Params
from meshpar.errors import MeshparError
from meshpar.lowering.optimizer import with_extra_args
from meshpar.lowering.state import TrainState


class EmaState(NamedTuple):
    """The state of `with_ema`.

    Attributes:
      inner: the state of the optimizer.
      ema: the average of every parameter, float32 or wider.
    """

    inner: Any
    ema: Any


def with_ema(
    optimizer: optax.GradientTransformation | optax.MultiSteps, decay: float
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that also keeps an exponential moving average of the weights.

    The average starts at the first weights. `TrainProgram.ema_weights` returns it, and
    `evaluate_params` takes it.

    Args:
      optimizer: makes the whole update; do not chain more behind `with_ema`.
      decay: part of the average that a step keeps, such as 0.999.

    Raises:
      MeshparError: `decay` is not in [0, 1).

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging,
      SIAM J. Control Optim. 30(4), 1992.
    """
    if not 0 <= decay < 1:
        raise MeshparError(f"with_ema(decay={decay}): use a number in [0, 1)")
    optimizer = with_extra_args(optimizer)

    def widened(x: jax.Array) -> jax.Array:
        # Steps of 1 - decay are too small for bfloat16.
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))

    def init(params: Any) -> EmaState:
        return EmaState(optimizer.init(params), jax.tree.map(widened, params))

    def update(
        updates: Any, state: EmaState, params: Any = None, **extra: Any
    ) -> tuple[Any, EmaState]:
        updates, inner = optimizer.update(updates, state.inner, params, **extra)
        new = optax.apply_updates(params, updates)
        ema = jax.tree.map(
            lambda average, x: decay * average + (1 - decay) * widened(x),
            state.ema,
            new,
        )
        return updates, EmaState(inner, ema)

    return optax.GradientTransformationExtraArgs(init, update)


def ema_weights(state: TrainState) -> Params:
    """The average of the weights in a training state, {path: array}.

    Weights that the optimizer does not train are returned as they are. Every average is
    placed as its weight, which offload may have put into another memory.

    Raises:
      MeshparError: the optimizer keeps none.
    """

    def is_ema(node: Any) -> bool:
        return isinstance(node, EmaState)

    nodes = jax.tree.leaves(state.optimizer_state, is_leaf=is_ema)
    if not (states := list(filter(is_ema, nodes))):
        raise MeshparError(
            "the optimizer keeps no average of the weights: lower with "
            "meshpar.with_ema(optimizer, decay)"
        )
    averages = {
        path: x
        for path, x in states[0].ema.items()
        if not isinstance(x, optax.MaskedNode)
    }

    def as_weight(average: jax.Array, weight: jax.Array) -> jax.Array:
        return jax.device_put(average.astype(weight.dtype), weight.sharding)

    return {
        path: as_weight(averages[path], x) if path in averages else x
        for path, x in state.params.items()
    }
