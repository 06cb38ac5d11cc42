"""Runs a stack of layers as a scan, each layer rematerialized by its policy."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.arrays import Array, Params, vary
from meshpar.layouts.scope import layer_policies, policy_of, remat

Key = Array | None
"""A random key; None runs the model in evaluation mode."""

Layer = Callable[[Params, Any, Key, Any], Any]
"""(parameters of one layer, x, key, context) -> x."""


def fold_key(key: Key, number: Any) -> Key:
    """`jax.random.fold_in`; None stays None."""
    return None if key is None else jax.random.fold_in(key, number)


def scan_layers(layer: Layer, stack: Params, x: Any, key: Key, context: Any) -> Any:
    """Runs a stack of layers, each rematerialized by the layout in use.

    Consecutive layers of one policy are one scan.

    Args:
      layer: runs one layer.
      stack: {path: [depth, ...]}.
      x: activations.
      key: layer i gets `fold_in(key, i)`.
      context: what all layers read.
    """
    depth = len(next(iter(stack.values())))
    # Replicas have batches of their own: layers make zeros beside activations differ.
    kinds = map(jax.typeof, jax.tree.leaves((stack, x)))
    axes = {axis for kind in kinds for axis in kind.manual_axis_type.varying}
    x = jax.tree.map(lambda leaf: vary(leaf, tuple(axes)), x)

    def body(x: Any, step: tuple[Params, Array]) -> tuple[Any, None]:
        params, i = step
        return layer(params, x, fold_key(key, i), context), None

    steps, start = (stack, jnp.arange(depth)), 0
    for policy, count in layer_policies(depth):
        own = steps if count == depth else _rows(steps, start, count)
        with policy_of(policy):
            x = jax.lax.scan(remat(body), x, own)[0]
        start += count
    return x


def _rows(tree: Any, start: int, count: int) -> Any:
    return jax.tree.map(lambda x: x[start : start + count], tree)
