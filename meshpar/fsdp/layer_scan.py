"""A scan over layers that gathers their weights before use, forward and backward.

The scan has a backward pass of its own, which fixes the values saved for it: a layer's
input and whatever its rematerialization policy saves, never a gathered weight. (A copy
that the layer itself makes in another dtype counts as an activation: let
`compute_dtype` cast, or rematerialize.) The gradient of a layer's weights is reduced as
soon as it exists. Weights may be gathered one layer ahead, beside a layer's compute.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array, Params, to_device
from meshpar.fsdp.product import with_products
from meshpar.fsdp.rows import Rows, add_to_row
from meshpar.fsdp.saved import Residuals, Saved, Slot, VjpReader
from meshpar.fsdp.sharding import automatic_axes
from meshpar.fsdp.split_backward import SplitBackward
from meshpar.layouts.stacks import Stacks
from meshpar.mesh.order import after


class _Weights(NamedTuple):
    """Weights of one layer.

    Attributes:
      whole: {path: weight}.
      stacks: of those that are rows as they stand.
    """

    whole: Params
    stacks: Stacks

    @property
    def all_read(self) -> Params:
        """All arrays that a layer reads for its weights, each by a name of its own."""
        arrays, row = self.stacks
        stacks = {f" stack of {path}": x for path, x in arrays.items()}
        return self.whole | stacks | ({" row": row} if stacks else {})


@dataclasses.dataclass(frozen=True)
class LayerScan:
    """Runs consecutive layers of a stack inside shard_map, forward and backward.

    Attributes:
      layer: (weights of one layer, x, its number, context, stacks of some of them) ->
        x of the same shapes.
      gather: (leaves, constants) of one layer, {path: array} -> its whole weights; a
        subset of the paths gives that subset of the weights. The weights are
        differentiated by the paths of the leaves.
      reduce: gradient of the weights -> gradient of the leaves.
      context: arrays that all layers read and that no gradient passes through.
      kept: x -> activations in it that every layer passes on as they are.
      ahead: paths gathered while the previous layer computes. The last layer of a pass
        gathers the first one's weights again, unused: depth + 1 gathers in all.
      streams: whether constants live in host memory, from where each layer's come to
        the device before they are gathered.
      saves_on_host: whether what a layer saves goes to host memory until the backward
        pass.
      by_parts: whether `reduce` gets gradients that are matmuls as `Product`s; with
        padding, which masks gradients, it gets arrays.
      padded: whether some rows are padding: they pass x and its gradient on, and their
        weights' gradients are zeros.
      mixes: as `Platform.mixes_collectives`; what is gathered outside the loop waits
        for the activations then, unless automatic axes split these.
      repeats: whether the backward pass computes values of the forward pass again.
      unroll: layers that one round of the loop runs. With all of them there is no loop,
        and each layer's residuals are arrays of their own: none is copied into a stack.
      in_place: paths of the weights whose stacks the layer gets.
    """

    layer: Callable[[Params, Any, Array, Any, Stacks], Any]
    gather: Callable[[Params, Params], Params]
    reduce: Callable[[Params], Params]
    context: Any = ()
    kept: Callable[[Any], tuple[Array, ...]] = lambda _: ()
    ahead: frozenset[str] = frozenset()
    streams: bool = False
    saves_on_host: bool = False
    by_parts: bool = False
    padded: bool = False
    mixes: bool = False
    repeats: bool = True
    unroll: int = 1
    in_place: frozenset[str] = frozenset()

    def is_written_out(self, depth: int) -> bool:
        """Whether so many layers run without a loop."""
        return 1 < depth <= self.unroll

    def _sweep(
        self,
        run_layer: Callable[[Any, _Weights, Array, Array, Any], tuple[Any, Any]],
        carry: Any,
        leaves: Params,
        constants: Params,
        rows: Rows,
        saved: Any,
        reverse: bool = False,
        into: Slot | None = None,
    ) -> tuple[Any, Any]:
        """Scans `run_layer(carry, weights, row, number, saved)` over rows.

        Without a loop `saved` and the second result are lists of what each layer has.
        Both may be slots instead: `saved` is read row by row then, and the second
        result is `into` with the rows that the layers give.
        """
        start, numbers = rows
        depth = len(numbers)

        def layer_slice(tree: Params, i: Any) -> Params:
            return {
                path: lax.dynamic_index_in_dim(x, start + i, keepdims=False)
                for path, x in tree.items()
            }

        def is_ahead(tree: Params, ahead: bool) -> Params:
            return {p: x for p, x in tree.items() if (p in self.ahead) == ahead}

        activations = carry

        def gather(i: Any, ahead: bool, in_loop: bool) -> _Weights:
            own = layer_slice(is_ahead(leaves, ahead), i)
            fixed = layer_slice(is_ahead(constants, ahead), i)
            fixed = to_device(fixed) if self.streams else fixed
            if not in_loop:
                own, fixed = self._after(activations, (own, fixed))
            whole = self.gather(own, fixed)
            stacks: Params = {}
            for tree, slices in ((leaves, own), (constants, fixed)):
                stacks |= {p: tree[p] for p, x in slices.items() if x is whole.get(p)}
            return _Weights(whole, self._read_in_place(stacks, start + i))

        def prefetch(i: Any, in_loop: bool) -> Params:
            return gather(i, True, in_loop).whole if self.ahead else {}

        is_loop = depth > self.unroll  # Compilers write a loop of one round out.

        def body(state: tuple, x: tuple) -> tuple[tuple, Any]:
            (carry, ready, into), (i, number, own_saved) = state, x
            if isinstance(saved, Slot):
                own_saved = saved.layer(i)
            following = prefetch((i + (depth - 1 if reverse else 1)) % depth, is_loop)
            own = gather(i, False, is_loop)
            weights = own._replace(whole=ready | own.whole)
            carry, y = run_layer(carry, weights, start + i, number, own_saved)
            if into is not None:
                into, y = into.with_layer(i, y), None
            return (carry, following, into), y

        first = carry, prefetch(depth - 1 if reverse else 0, in_loop=False), into
        scanned = None if isinstance(saved, Slot) else saved
        (carry, _, into), ys = self._rounds(body, first, numbers, scanned, reverse)
        return carry, into or ys

    def _rounds(
        self,
        body: Callable[[Any, tuple], tuple[Any, Any]],
        state: Any,
        numbers: Array,
        saved: Any,
        reverse: bool,
    ) -> tuple[Any, Any]:
        """Runs `body(state, (index, number, saved))` for all layers, as `lax.scan`."""
        depth = len(numbers)
        xs = jnp.arange(depth), numbers, saved
        if depth == 1:  # TPUs run parts of a loop of one round twice.
            state, y = body(state, jax.tree.map(lambda x: x[0], xs))
            return state, jax.tree.map(lambda y: y[None], y)
        if not self.is_written_out(depth):
            unroll = min(self.unroll, depth)
            return lax.scan(body, state, xs, reverse=reverse, unroll=unroll)
        saved, ys = saved or [None] * depth, []
        for i in reversed(range(depth)) if reverse else range(depth):
            state, y = body(state, (i, numbers[i], saved[i]))
            ys.append(y)
        return state, ys[::-1] if reverse else ys

    def _read_in_place(self, stacks: Params, row: Any) -> Stacks:
        """The stacks that the layer gets: one row alone is no slice."""
        wanted = {p: x for p, x in stacks.items() if p in self.in_place and len(x) > 1}
        return Stacks(wanted, jnp.asarray(row, jnp.int32) if wanted else None)

    def _after(self, activations: Any, weights: Any) -> Any:
        """The weights, after some activations if collectives mix with loops'."""
        if not self.mixes or automatic_axes():
            return weights
        arrays = jax.tree.leaves(activations)
        arrays = {str(i): x for i, x in enumerate(arrays) if x.size}
        return after(arrays, weights)

    def _beside(self, kept: tuple[Array, ...]) -> dict[str, Array]:
        """Context and kept activations, by names that no weight has."""
        arrays = *jax.tree.leaves(self.context), *kept
        return {f" beside {i}": x for i, x in enumerate(arrays)}

    def _unless_padding(self, number: Array, value: Any, other: Any) -> Any:
        """A layer's result; `other` for padding."""
        if not self.padded:
            return value
        return jax.tree.map(lambda a, b: jnp.where(number >= 0, a, b), value, other)

    def _mask_gradient(self, number: Array, gradient: Params) -> Params:
        """The gradient of a layer's weights; zeros for padding."""
        zeros = jax.tree.map(jnp.zeros_like, gradient)
        return self._unless_padding(number, gradient, zeros)

    def run(self, leaves: Params, constants: Params, x: Any, rows: Rows) -> Any:
        """The layers' output; saves nothing.

        Args:
          leaves: {path: [depth of the whole stack, ...]}.
          constants: {path: [depth of the whole stack, ...]}, not differentiated.
          x: activations.
          rows: the rows of the stack to run.
        """

        def run_layer(
            x: Any, weights: _Weights, _: Array, number: Array, __: None
        ) -> tuple[Any, None]:
            y = self.layer(weights.whole, x, number, self.context, weights.stacks)
            return self._unless_padding(number, y, x), None

        return self._sweep(run_layer, x, leaves, constants, rows, None)[0]

    def forward(
        self,
        leaves: Params,
        constants: Params,
        x: Any,
        rows: Rows,
        slot: Slot | None = None,
    ) -> tuple[Any, Residuals]:
        """The layers' output, and the residuals that `backward` needs.

        Args:
          leaves: as in `run`.
          constants: as in `run`.
          x: as in `run`.
          rows: as in `run`.
          slot: where the layers put what they save; by default they return it.
        """

        def run_layer(
            x: Any, weights: _Weights, _: Array, number: Array, __: None
        ) -> tuple[Any, Saved]:
            whole, stacks = weights

            def layer(trained: Params, x: Any) -> Any:
                return self.layer(whole | trained, x, number, self.context, stacks)

            y, vjp = jax.vjp(layer, {path: whole[path] for path in leaves}, x)
            saved = VjpReader.save(vjp, weights.all_read | self._beside(self.kept(x)))
            saved = saved.on_host() if self.saves_on_host else saved
            return self._unless_padding(number, y, x), saved

        y, saved = self._sweep(run_layer, x, leaves, constants, rows, None, into=slot)
        return y, Residuals(saved, self.kept(x))

    def backward(
        self,
        leaves: Params,
        constants: Params,
        residuals: Residuals,
        dx: Any,
        rows: Rows,
        sums: Params | None = None,
        on: Array | None = None,
    ) -> tuple[Any, Params]:
        """The backward pass: (gradient of the input, gradient of the leaves).

        Args:
          leaves: as given to `forward`.
          constants: as given to `forward`.
          residuals: those that `forward` returned.
          dx: gradient of the output.
          rows: as given to `forward`.
          sums: {path: [depth of the whole stack, ...]} to which the gradients of these
            rows are added in place. Without them they are returned, [rows, ...].
          on: whether to add them; by default they are added.
        """

        def run_layer(
            carry: tuple, weights: _Weights, row: Array, number: Array, saved: Saved
        ) -> tuple[tuple, Params]:
            dy, stack = carry
            known = weights.all_read | self._beside(residuals.kept)
            saved = saved.on_device() if self.saves_on_host else saved
            dweights, dx = self._vjp(known, saved, dy)
            dweights = self._mask_gradient(number, dweights)
            dx = self._unless_padding(number, dx, dy)
            gradient = self.reduce(dweights)
            if stack is None:
                return (dx, None), gradient
            return (dx, add_to_row(stack, gradient, row, on)), {}

        carry, saved = (dx, sums), residuals.layers
        (dx, stack), gradient = self._sweep(
            run_layer, carry, leaves, constants, rows, saved, reverse=True
        )
        if stack is not None:
            return dx, stack
        if self.is_written_out(len(rows.numbers)):
            gradient = jax.tree.map(lambda *x: jnp.stack(x), *gradient)
        return dx, gradient

    def _vjp(self, weights: Params, saved: Saved, dy: Any) -> tuple[Any, Any]:
        """(gradients of a layer's weights, gradient of its input)."""
        if not self.by_parts or self.padded:
            return saved.reader.vjp(saved, weights)(dy)

        def backward(weights: Params, args: tuple) -> tuple[Params, Any]:
            saved, dy = args
            return saved.reader.vjp(saved, weights)(dy)

        return with_products(backward, weights, (saved, dy))

    def backward_input(
        self,
        leaves: Params,
        constants: Params,
        residuals: Residuals,
        dx: Any,
        rows: Rows,
        slot: Slot | None = None,
    ) -> tuple[Any, Saved | list[Saved] | Slot]:
        """B, the first part of `backward`: (gradient of the input, state for W).

        Takes the arguments of `backward`, and a slot where the layers put the state; by
        default they return it, as `forward` does.
        """

        def backward(weights: Params, args: tuple) -> tuple[Params, Any]:
            saved, dy, beside = args
            return saved.reader.vjp(saved, weights | beside)(dy)

        def run_layer(
            dy: Any, weights: _Weights, _: Array, number: Array, saved: Saved
        ) -> tuple[Any, Saved]:
            args = saved, dy, self._beside(residuals.kept)
            split = SplitBackward.of(backward, weights.all_read, args)
            dx, arrays = split.run_first(weights.all_read, args)
            state = Saved.of(arrays, split, len(split.first), len(split.second))
            return self._unless_padding(number, dx, dy), state

        args = leaves, constants, rows, residuals.layers
        return self._sweep(run_layer, dx, *args, reverse=True, into=slot)

    def backward_weights(
        self,
        leaves: Params,
        constants: Params,
        state: Saved | list[Saved] | Slot,
        rows: Rows,
        sums: Params,
        on: Array,
    ) -> Params:
        """W, the second part: sums with the gradients of these rows added if `on`.

        Takes the arguments of `backward`, with the state that `backward_input` returned
        in place of the residuals.
        """

        def run_layer(
            sums: Params, weights: _Weights, row: Array, number: Array, state: Saved
        ) -> tuple[Params, None]:
            gradient = state.reader.run_second(weights.all_read, state.unpack())
            gradient = self.reduce(self._mask_gradient(number, gradient))
            return add_to_row(sums, gradient, row, on), None

        return self._sweep(run_layer, sums, leaves, constants, rows, state)[0]
