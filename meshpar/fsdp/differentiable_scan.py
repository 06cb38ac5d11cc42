"""A stack of layers as one function, which jax differentiates by `LayerScan`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.arrays import Params
from meshpar.fsdp.layer_scan import LayerScan, Rows


def differentiable(layers: LayerScan) -> Callable[[Params, Params, Any], Any]:
    """The whole stack as a function that jax differentiates by `LayerScan.backward`.

    Args:
      layers: runs a stack in which row i is layer i.

    Returns:
      (leaves {path: [depth, ...]}, constants {path: [depth, ...]}, x) -> x.
    """

    def rows(*trees: Params) -> Rows:
        stacked = next(x for tree in trees for x in tree.values())
        return Rows(0, jnp.arange(len(stacked)))

    @jax.custom_vjp
    def run(leaves: Params, constants: Params, x: Any) -> Any:
        return layers.run(leaves, constants, x, rows(leaves, constants))

    def forward(leaves: Params, constants: Params, x: Any) -> tuple[Any, Any]:
        x, saved = layers.forward(leaves, constants, x, rows(leaves, constants))
        return x, (leaves, constants, saved)

    def backward(residuals: Any, dx: Any) -> tuple[Params, None, Any]:
        leaves, constants, saved = residuals
        both = rows(leaves, constants)
        dx, dleaves = layers.backward(leaves, constants, saved, dx, both)
        return dleaves, None, dx

    run.defvjp(forward, backward)
    return run
