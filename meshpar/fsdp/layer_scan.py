"""A stack of layers whose weights are gathered before use, and again going backward.

The scan has a backward pass of its own, so that it is certain what is kept between the
passes: a layer's input and whatever its rematerialization policy keeps, never a
gathered weight (a copy of it that the layer itself makes, in another dtype, counts as
an activation: let `compute_dtype` cast, or rematerialize). The gradient of a layer's
weights is reduced as soon as it exists. Some weights may be gathered one layer ahead,
so that the gather hides behind a layer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array, Params
from meshpar.fsdp.saved import Saved, VjpReader
from meshpar.fsdp.split_backward import SplitBackward


@dataclasses.dataclass(frozen=True)
class LayerScan:
    """Runs consecutive layers of a stack inside shard_map, forward and backward.

    Attributes:
      layer: (weights of one layer, x, its number) -> x of the same shapes.
      gather: (differentiated leaves, constants of one layer) -> its weights, {path:
        array} in both; of a part of the leaves it makes that part.
      reduce: gradient of the weights -> gradient of the leaves.
      padded: whether some rows are padding, with a number below 0: they pass x on, and
        whatever their zero weights give going backward is dropped.
      ahead: paths that are gathered while the layer before computes. The last layer
        of a pass gathers the first one's again, unused: one gather in `depth + 1`.
    """

    layer: Callable[[Params, Any, Array], Any]
    gather: Callable[[Params, Params], Params]
    reduce: Callable[[Params], Params]
    ahead: frozenset[str] = frozenset()
    padded: bool = False

    def _sweep(
        self,
        one: Callable[[Any, Params, Array, Array, Any], tuple[Any, Any]],
        carry: Any,
        leaves: Params,
        constants: Params,
        rows: tuple[Any, Array],
        rest: Any,
        reverse: bool = False,
    ) -> tuple[Any, Any]:
        """Scans `one(carry, weights, row, number, rest)` over rows of the stack."""
        start, numbers = rows
        depth = len(numbers)

        def taken(tree: Params, i: Any) -> Params:
            return {
                path: lax.dynamic_index_in_dim(x, start + i, keepdims=False)
                for path, x in tree.items()
            }

        coming = {path: x for path, x in leaves.items() if path in self.ahead}
        own = {path: x for path, x in leaves.items() if path not in self.ahead}

        def early(i: Any) -> Params:
            return self.gather(taken(coming, i), {}) if coming else {}

        def body(state: tuple, x: tuple) -> tuple[tuple, Any]:
            (carry, ready), (i, number, rest) = state, x
            following = early((i + (depth - 1 if reverse else 1)) % depth)
            weights = ready | self.gather(taken(own, i), taken(constants, i))
            carry, y = one(carry, weights, start + i, number, rest)
            return (carry, following), y

        first = carry, early(depth - 1 if reverse else 0)
        xs = jnp.arange(depth), numbers, rest
        (carry, _), ys = lax.scan(body, first, xs, reverse=reverse)
        return carry, ys

    def _or(self, number: Array, value: Any, passed: Any) -> Any:
        """What a layer made, or what padding passes on."""
        if not self.padded:
            return value
        return jax.tree.map(lambda a, b: jnp.where(number >= 0, a, b), value, passed)

    def _of_layer(self, number: Array, gradient: Params) -> Params:
        return self._or(number, gradient, jax.tree.map(jnp.zeros_like, gradient))

    def run(
        self, leaves: Params, constants: Params, x: Any, rows: tuple[Any, Array]
    ) -> Any:
        """The layers' output, keeping nothing.

        Args:
          leaves: {path: [depth of the whole stack, ...]}.
          constants: likewise.
          x: activations.
          rows: the first row of the stack to run, and the numbers of the layers from
            there on.
        """

        def one(x: Any, weights: Params, _: Array, number: Array, __: None) -> tuple:
            return self._or(number, self.layer(weights, x, number), x), None

        return self._sweep(one, x, leaves, constants, rows, None)[0]

    def forward(
        self, leaves: Params, constants: Params, x: Any, rows: tuple[Any, Array]
    ) -> tuple[Any, Saved]:
        """As `run`, with what `backward` needs: arrays [layers run, ...]."""

        def one(x: Any, weights: Params, _: Array, number: Array, __: None) -> tuple:
            y, vjp = jax.vjp(
                lambda weights, x: self.layer(weights, x, number), weights, x
            )
            return self._or(number, y, x), VjpReader.save(vjp, weights)

        return self._sweep(one, x, leaves, constants, rows, None)

    def backward(
        self,
        leaves: Params,
        constants: Params,
        saved: Saved,
        dx: Any,
        rows: tuple[Any, Array],
        sums: Params | None = None,
        on: Array | None = None,
    ) -> tuple[Any, Params]:
        """From the gradient of the output to that of the input and of the leaves.

        Args:
          leaves: as given to `forward`.
          constants: likewise.
          saved: what it returned.
          dx: gradient of the output.
          rows: as given to `forward`.
          sums: {path: [depth of the whole stack, ...]} to which the gradients of these
            rows are added in place; without it they are returned, [layers run, ...].
          on: whether they are added at all; by default they are.
        """

        def one(
            carry: tuple, weights: Params, row: Array, number: Array, saved: Saved
        ) -> tuple[tuple, Params]:
            dy, sums = carry
            dweights, dx = saved.reader.vjp(saved, weights)(dy)
            dweights, dx = self._of_layer(number, dweights), self._or(number, dx, dy)
            gradient = self.reduce(dweights)
            if sums is None:
                return (dx, None), gradient
            return (dx, _added(sums, gradient, row, on)), {}

        carry = dx, sums
        (dx, sums), gradient = self._sweep(
            one, carry, leaves, constants, rows, saved, reverse=True
        )
        return dx, gradient if sums is None else sums

    def backward_input(
        self,
        leaves: Params,
        constants: Params,
        saved: Saved,
        dx: Any,
        rows: tuple[Any, Array],
    ) -> tuple[Any, list[Array]]:
        """The first part of `backward` (B): (gradient of the input, what W needs)."""

        def both(weights: Params, args: tuple) -> tuple[Params, Any]:
            saved, dx = args
            return saved.reader.vjp(saved, weights)(dx)

        def one(
            dy: Any, weights: Params, _: Array, number: Array, saved: Saved
        ) -> tuple[Any, Saved]:
            split = SplitBackward.of(both, weights, (saved, dy))
            dx, state = split.run_first(weights, (saved, dy))
            return self._or(number, dx, dy), Saved.of(state, split)

        return self._sweep(one, dx, leaves, constants, rows, saved, reverse=True)

    def backward_weights(
        self,
        leaves: Params,
        constants: Params,
        state: Saved,
        rows: tuple[Any, Array],
        sums: Params,
        on: Array,
    ) -> Params:
        """The second part (W): sums with the gradients of these rows added if `on`."""

        def one(
            sums: Params, weights: Params, row: Array, number: Array, state: Saved
        ) -> tuple[Params, None]:
            gradient = state.reader.run_second(weights, state.unpack())
            gradient = self._of_layer(number, gradient)
            gradient = self.reduce(gradient)
            return _added(sums, gradient, row, on), None

        return self._sweep(one, sums, leaves, constants, rows, state)[0]


def _added(sums: Params, new: Params, row: Array, on: Array | None) -> Params:
    added = {}
    for path, total in sums.items():
        more = new[path].astype(total.dtype)
        more = more if on is None else jnp.where(on, more, 0)
        before = lax.dynamic_index_in_dim(total, row, keepdims=False)
        added[path] = lax.dynamic_update_index_in_dim(total, before + more, row, 0)
    return added


def differentiable(layers: LayerScan) -> Callable[[Params, Params, Any], Any]:
    """The whole stack as a function that jax differentiates by `LayerScan.backward`.

    Returns:
      (leaves {path: [depth, ...]}, constants {path: [depth, ...]}, x) -> x.
    """

    def rows(leaves: Params) -> tuple[int, Array]:
        return 0, jnp.arange(len(next(iter(leaves.values()))))

    @jax.custom_vjp
    def run(leaves: Params, constants: Params, x: Any) -> Any:
        return layers.run(leaves, constants, x, rows(leaves))

    def forward(leaves: Params, constants: Params, x: Any) -> tuple[Any, Any]:
        x, saved = layers.forward(leaves, constants, x, rows(leaves))
        return x, (leaves, constants, saved)

    def backward(residuals: Any, dx: Any) -> tuple[Params, None, Any]:
        leaves, constants, saved = residuals
        dx, dleaves = layers.backward(leaves, constants, saved, dx, rows(leaves))
        return dleaves, None, dx

    run.defvjp(forward, backward)
    return run
