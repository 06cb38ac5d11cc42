"""Experts balanced without a loss, by a bias on the router's scores (DeepSeek-V3).

The bias rises for experts below the mean load and falls for those above it. It is a
parameter whose gradient is the load, so that every layout sums it as it sums gradients,
and checkpoints hold it as they hold parameters. `balanced` turns the gradient into the
step of the bias.

Source: Wang et al., Auxiliary-Loss-Free Load Balancing, arXiv:2408.15664; DeepSeek-V3,
  arXiv:2412.19437, section 2.1.2.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from meshpar.arrays import Array
from meshpar.errors import MeshparError
from meshpar.layouts.param import LOAD_DIM, follows_load
from meshpar.models.model import Model

_EQUAL = 1e-6
"""Loads that differ from the mean by less than this part of it count as equal to it.

Layouts add up loads in another order, and may round them in another way.
"""


def load_term(bias_E: Array, load_E: Array) -> Array:
    """0, with the shares of the choices as its gradient by the bias.

    Args:
      bias_E: the bias, float32.
      load_E: choices of each expert.
    """
    share_E = lax.stop_gradient(load_E / jnp.sum(load_E))
    return jnp.sum((bias_E - lax.stop_gradient(bias_E)) * share_E)


def balanced_bias(bias_E: Array, load_E: Array, rate: float) -> Array:
    """The bias after a step: lower for experts above the mean load, higher below it.

    Args:
      bias_E: before the step, [..., E].
      load_E: load of each expert in the step, in any unit.
      rate: size of the change.
    """
    return bias_E + _change(load_E, rate).astype(bias_E.dtype)


def _change(load_E: Array, rate: float) -> Array:
    load_E = load_E.astype(jnp.float32)
    mean = jnp.mean(load_E, axis=-1, keepdims=True)
    missing_E = mean - load_E
    is_equal = jnp.abs(missing_E) < _EQUAL * mean
    return jnp.where(is_equal, 0.0, rate * jnp.sign(missing_E))


def balanced(
    optimizer: optax.GradientTransformation, model: Model, rate: float
) -> optax.GradientTransformationExtraArgs:
    """The optimizer, with steps of `rate` for the biases that balance experts.

    Neither its learning rate nor its weight decay changes those, and the size of their
    gradient does not matter.

    Args:
      optimizer: of all other parameters.
      model: names the biases' last dim "expert_load".
      rate: size of a step.

    Raises:
      MeshparError: the model has no such bias.
    """
    biases = {path for path, p in model.params.items() if follows_load(p.names)}
    biases |= {row for path in biases for row in model.rows.get(path, ())}
    if not biases:
        raise MeshparError(
            "the model has no bias that balances experts: name the dim of one "
            f"{LOAD_DIM!r} and give it to experts.mixture as bias_E, or use the "
            "optimizer alone"
        )

    def labels(params: Any) -> Any:
        def label(keys: tuple[Any, ...], _: Any) -> str:
            path = "/".join(str(key.key) for key in keys)
            return "load" if path in biases else "loss"

        return jax.tree_util.tree_map_with_path(label, params)

    return optax.partition({"loss": optimizer, "load": _follow_loads(rate)}, labels)


def _follow_loads(rate: float) -> optax.GradientTransformation:
    """Steps by the sign of the difference from the mean load."""

    def update(loads: Any, params: Any) -> Any:
        del params
        return jax.tree.map(lambda x: _change(x, rate).astype(x.dtype), loads)

    return optax.stateless(update)
