"""A model's own loop over its layers, whose weights may live in host memory."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import to_device
from meshpar.layouts.offload import PARAMETERS
from meshpar.layouts.scope import current_scope

_X = TypeVar("_X")


def over_layers(layer: Callable[[_X, Any], _X], x: _X, stack: Any) -> _X:
    """Runs layers one after another: x = layer(x, weights of one layer).

    Under a layout with `offload=parameters` the weights of each layer come from host
    memory while the layer before computes, so that two layers are on the device at a
    time. The last layer fetches the first one's weights again, unused.

    Args:
      layer: (x, weights of one layer) -> x of the same shapes.
      x: any pytree of arrays.
      stack: the layers' weights: a pytree of arrays [layers, ...].

    Source: Aminabadi et al., DeepSpeed Inference, arXiv:2207.00032, section 6
      (ZeRO-Inference).
    """
    scope = current_scope()
    if scope is None or PARAMETERS not in scope.layout.offloaded:
        return lax.scan(lambda x, weights: (layer(x, weights), None), x, stack)[0]
    depth = len(jax.tree.leaves(stack)[0])

    def fetch(number: Any) -> Any:
        row = lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False)  # noqa: E731
        return to_device(jax.tree.map(row, stack))

    def body(state: tuple[_X, Any], number: Any) -> tuple[tuple[_X, Any], None]:
        x, weights = state
        following = fetch((number + 1) % depth)
        return (layer(x, weights), following), None

    return lax.scan(body, (x, fetch(0)), jnp.arange(depth))[0][0]
