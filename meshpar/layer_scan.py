"""A stack of layers whose weights are gathered before use, and again going backward.

The scan has a backward pass of its own, so that it is certain what is kept between the
passes: a layer's input and whatever its rematerialization policy keeps, never a
gathered weight. The gradient of a layer's weights is reduced as soon as it exists.
Some weights may be gathered one layer ahead, so that the gather hides behind a layer.
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
    ahead: frozenset[str] = frozenset(),
) -> Callable[[Params, Params, Any], Any]:
    """Makes the function that runs a stack of layers inside shard_map.

    Args:
      layer: (weights of one layer, x, its number) -> x of the same shapes.
      gather: (differentiated leaves, constants of one layer) -> its weights, {path:
        array} in both; of a part of the leaves it makes that part.
      reduce: gradient of the weights -> gradient of the leaves.
      ahead: paths that are gathered while the layer before computes. The last layer
        of a pass gathers the first one's again, unused: one gather in `depth + 1`.

    Returns:
      (leaves {path: [depth, ...]}, constants {path: [depth, ...]}, x) -> x.
    """
    stashes: list[Stash] = []

    def sweep(
        one: Callable, carry: Any, leaves: Params, xs: Any, reverse: bool = False
    ) -> tuple[Any, Any]:
        """Scans `one(carry, weights, constants, number, rest)` over the layers."""
        constants, rest = xs
        depth = len(next(iter(leaves.values())))
        coming = {path: x for path, x in leaves.items() if path in ahead}
        own = {path: x for path, x in leaves.items() if path not in ahead}

        def early(i: Any) -> Params:
            layer_i = {
                path: lax.dynamic_index_in_dim(x, i, keepdims=False)
                for path, x in coming.items()
            }
            return gather(layer_i, {}) if coming else {}

        def body(state: tuple, x: tuple) -> tuple[tuple, Any]:
            (carry, ready), (i, own, constants, rest) = state, x
            following = early((i + (depth - 1 if reverse else 1)) % depth)
            carry, y = one(carry, ready | gather(own, constants), i, rest)
            return (carry, following), y

        start = carry, early(depth - 1 if reverse else 0)
        numbered = jnp.arange(depth), own, constants, rest
        (carry, _), ys = lax.scan(body, start, numbered, reverse=reverse)
        return carry, ys

    @jax.custom_vjp
    def run(leaves: Params, constants: Params, x: Any) -> Any:
        def one(x: Any, weights: Params, i: Array, _: None) -> tuple[Any, None]:
            return layer(weights, x, i), None

        return sweep(one, x, leaves, (constants, None))[0]

    def forward(leaves: Params, constants: Params, x: Any) -> tuple[Any, Any]:
        def one(x: Any, weights: Params, i: Array, _: None) -> tuple[Any, list[Array]]:
            x, vjp = jax.vjp(lambda weights, x: layer(weights, x, i), weights, x)
            stash, kept = Stash.of(vjp, weights)
            stashes.append(stash)
            return x, kept

        x, kept = sweep(one, x, leaves, (constants, None))
        return x, (leaves, constants, kept)

    def backward(saved: Any, dx: Any) -> tuple[Params, None, Any]:
        leaves, constants, kept = saved
        stash = stashes[-1]

        def one(
            dx: Any, weights: Params, i: Array, kept: list[Array]
        ) -> tuple[Any, Params]:
            dweights, dx = stash.vjp(kept, weights)(dx)
            return dx, reduce(dweights)

        dx, dleaves = sweep(one, dx, leaves, (constants, kept), reverse=True)
        return dleaves, None, dx

    run.defvjp(forward, backward)
    return run
