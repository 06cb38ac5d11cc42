"""A stack of layers whose weights are gathered before use, and again going backward.

The scan has a backward pass of its own, so that it is certain what is kept between the
passes: a layer's input and whatever its rematerialization policy keeps, never a
gathered weight. The gradient of a layer's weights is reduced as soon as it exists.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
Params = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Stash:
    """What one layer keeps for its backward pass: a vjp without its weights.

    Attributes:
      treedef: structure of the vjp function.
      weights: for every leaf of it the path of the weight that stands there, or None.
    """

    treedef: Any
    weights: tuple[str | None, ...]

    @classmethod
    def of(cls, vjp: Callable, weights: Params) -> tuple["Stash", list[Array]]:
        """Splits a vjp function into its structure and the arrays to keep."""
        leaves, treedef = jax.tree.flatten(vjp)
        paths = tuple(
            next((path for path, w in weights.items() if w is leaf), None)
            for leaf in leaves
        )
        kept = [x for x, path in zip(leaves, paths, strict=True) if path is None]
        return cls(treedef, paths), kept

    def vjp(self, kept: list[Array], weights: Params) -> Callable:
        """The vjp function again, with weights gathered anew."""
        rest = iter(kept)
        leaves = [next(rest) if p is None else weights[p] for p in self.weights]
        return jax.tree.unflatten(self.treedef, leaves)


def scan_gathered(
    layer: Callable[[Params, Any, Array], Any],
    gather: Callable[[Params, Params], Params],
    reduce: Callable[[Params], Params],
) -> Callable[[Params, Params, Any], Any]:
    """Makes the function that runs a stack of layers inside shard_map.

    Args:
      layer: (weights of one layer, x, its number) -> x of the same shapes.
      gather: (differentiated leaves, constants of one layer) -> its weights, {path:
        array} in both.
      reduce: gradient of the weights -> gradient of the leaves.

    Returns:
      (leaves {path: [depth, ...]}, constants {path: [depth, ...]}, x) -> x.
    """
    stashes: list[Stash] = []

    def forward_one(x: Any, one: tuple) -> tuple[Any, list[Array]]:
        leaves, constants, i = one
        weights = gather(leaves, constants)
        x, vjp = jax.vjp(lambda weights, x: layer(weights, x, i), weights, x)
        stash, kept = Stash.of(vjp, weights)
        stashes.append(stash)
        return x, kept

    def numbers(leaves: Params) -> Array:
        return jnp.arange(len(next(iter(leaves.values()))))

    @jax.custom_vjp
    def run(leaves: Params, constants: Params, x: Any) -> Any:
        def one(x: Any, one: tuple) -> tuple[Any, None]:
            leaves, constants, i = one
            return layer(gather(leaves, constants), x, i), None

        return lax.scan(one, x, (leaves, constants, numbers(leaves)))[0]

    def forward(leaves: Params, constants: Params, x: Any) -> tuple[Any, Any]:
        xs = leaves, constants, numbers(leaves)
        x, kept = lax.scan(forward_one, x, xs)
        return x, (leaves, constants, kept)

    def backward(saved: Any, dx: Any) -> tuple[Params, None, Any]:
        stash = stashes[-1]

        def one(dx: Any, one: tuple) -> tuple[Any, Params]:
            leaves, constants, kept = one
            dweights, dx = stash.vjp(kept, gather(leaves, constants))(dx)
            return dx, reduce(dweights)

        dx, dleaves = lax.scan(one, dx, saved, reverse=True)
        return dleaves, None, dx

    run.defvjp(forward, backward)
    return run
