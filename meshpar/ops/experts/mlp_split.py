"""The split of the experts' mlp dim over automatic axes, such as `tensor`.

Every device of them runs the same tokens through its part of each expert. Outputs are
combined per token before they are summed: k experts a token would move k times as much.
Between blocks the axes split the length of sequences, and tokens move as Megatron's
activations do: gathered once, summed and scattered once.

Source: Korthikanti et al., arXiv:2205.05198, section 4.2.2 (sequence parallelism).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, vary
from meshpar.collectives.transport import ONE_SHOT, Transport, transport_alone
from meshpar.contracts.purposes import purpose
from meshpar.layouts.axes import ways_of
from meshpar.layouts.plan import partition_spec
from meshpar.layouts.scope import Scope, activation_axes
from meshpar.layouts.stacks import InStack, place_of, standing
from meshpar.ops.experts.config import Experts
from meshpar.ops.experts.exchange import Collective, widened, with_transpose
from meshpar.ops.tensor_split import INTO, OUT, mapped_unchecked

Outputs = Callable[[Array, Array, Array, Experts], tuple[Array, Any]]
"""(tokens [B, L, D], their experts [B, L, X], weights [B, L, X], matrices) -> (outputs
[B, L, D], facts that are the same on all devices)."""


@dataclasses.dataclass(frozen=True)
class MlpSplit:
    """The split of the experts' mlp dim inside a shard_map.

    Attributes:
      axes: the automatic axes that split it.
      automatic: all automatic axes.
      by_length: whether they split the length of sequences between blocks.
      adds: moves outputs to where they are added up.
    """

    axes: tuple[str, ...]
    automatic: frozenset[str]
    by_length: bool
    adds: Transport = ONE_SHOT

    @classmethod
    def of(
        cls, scope: Scope, x_BLD: Array, axes: tuple[str, ...], call: str
    ) -> "MlpSplit | None":
        """The split under a layout; None if no axis splits the dim.

        Args:
          scope: of the model.
          x_BLD: tokens.
          axes: that split the mlp dim.
          call: what the model wrote, for errors.
        """
        if not axes:
            return None
        (between,) = activation_axes(scope, ["residual_length"], call)
        divides = x_BLD.shape[1] % ways_of(axes, scope.mesh.shape) == 0
        automatic = frozenset(scope.mesh.axis_names) - scope.manual_axes
        adds = transport_alone(scope.mesh, axes)
        return cls(axes, automatic, between == axes and divides, adds)

    def run(
        self,
        outputs: Outputs,
        x_BLD: Array,
        experts_BLX: Array,
        weights_BLX: Array,
        experts: Experts,
    ) -> tuple[Array, Any]:
        """Outputs of all tokens, summed over the parts of the mlp dim.

        Communication: an all_gather of tokens and of weights and a reduce_scatter of
        outputs, or an all_reduce of outputs where the length is whole between blocks;
        backward the transposes.

        Args:
          outputs: runs tokens through the experts' parts of one device.
          x_BLD: tokens.
          experts_BLX: their experts.
          weights_BLX: float32 weights of the experts' outputs.
          experts: the matrices.
        """
        args = [x for x in (x_BLD, weights_BLX, *experts) if x is not None]
        axes = {a for x in args for a in jax.typeof(x).manual_axis_type.varying}
        places = [place and place.varying(tuple(axes)) for place in map(place_of, args)]
        args = [vary(x, tuple(axes)) for x in args]
        return _run(self, outputs, (experts_BLX, places), tuple(args))

    def mapped(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """A function on the shards of each device."""

        def untyped(*args: Any) -> Any:
            # Types of arguments name the axes over which they vary, and types of
            # results do not: a derivative refuses the mixture. A reshape drops them.
            return fn(*jax.tree.map(lambda x: x[None].squeeze(0), args))

        return mapped_unchecked(untyped, in_specs, out_specs, self.automatic)

    @property
    def tokens(self) -> PartitionSpec:
        """Spec of tokens outside."""
        return partition_spec(((), self.axes if self.by_length else ()))

    @property
    def args(self) -> tuple[PartitionSpec, ...]:
        """Specs of tokens, weights, and the matrices up, down and gate."""
        up, down = (partition_spec(d) for d in (((), (), self.axes), ((), self.axes)))
        return self.tokens, self.tokens, up, down, up

    def of_places(self, places: Sequence[InStack | None]) -> list[InStack | None]:
        """Specs of the places of the arguments."""

        def of_place(place: InStack, spec: PartitionSpec) -> InStack:
            master = None if place.master is None else spec
            return InStack(PartitionSpec(None, *spec), PartitionSpec(), master)

        pairs = zip(places, self.args, strict=False)
        return [place and of_place(place, spec) for place, spec in pairs]

    # Inside shard_map.

    def whole(self, x: Array) -> Array:
        """Values of all tokens, from this device's part of the length."""
        gather, add = self._moves()
        with purpose(INTO):
            return with_transpose(gather, add)(x)

    def summed(self, y: Array) -> Array:
        """The sum of the devices' outputs; this device's part of the length."""
        gather, add = self._moves()
        with purpose(OUT):
            return with_transpose(add, gather)(y)

    def _moves(self) -> tuple[Collective, Collective]:
        """(gather, add) of values of tokens, which are each other's transposes.

        They are collectives of the compiler where it keeps them: no matmul of the
        experts could run beside a ring, each step of which adds or copies a part.
        """

        def gather(x: Array) -> Array:
            if not self.by_length:
                return x
            return ONE_SHOT.all_gather(widened(x), self.axes, 1).astype(x.dtype)

        def add(x: Array) -> Array:
            wide = widened(x)
            if self.by_length:
                return self.adds.reduce_scatter(wide, self.axes, 1).astype(x.dtype)
            return jax.lax.psum(wide, self.axes).astype(x.dtype)

        return gather, add


_Fixed = tuple[Array, Sequence[InStack | None]]
"""(experts [B, L, X] of the tokens, places of the arguments)."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(
    split: MlpSplit, outputs: Outputs, fixed: _Fixed, args: tuple[Array, ...]
) -> tuple[Array, Any]:
    return _forward(split, outputs, fixed, args)[0]


def _forward(
    split: MlpSplit, outputs: Outputs, fixed: _Fixed, args: tuple[Array, ...]
) -> tuple[tuple[Array, Any], tuple]:
    """The result, and what the backward pass needs, stacked over the devices.

    Jax saves values of a nested shard_map as if all axes around it were automatic, and
    cannot lower that, so they are saved by hand.
    """
    backward: list[Callable] = []

    def on_shards(args: tuple[Array, ...], fixed: _Fixed) -> tuple:
        experts_BKX, places = fixed

        def fn(*args: Array) -> tuple[Array, Any]:
            x_BKD, weights_BKX, *matrices = args
            x_BLD, weights_BLX = split.whole(x_BKD), split.whole(weights_BKX)
            experts_BLX = split.whole(experts_BKX)
            experts = Experts(*matrices)
            with standing(zip(args, places, strict=True)):
                y_BLD, facts = outputs(x_BLD, experts_BLX, weights_BLX, experts)
            return split.summed(y_BLD), facts

        y_BKD, vjp, facts = jax.vjp(fn, *args, has_aux=True)
        leaves, tree = jax.tree.flatten(vjp)
        known = *args, *jax.tree.leaves(places)
        given = [next((i for i, x in enumerate(known) if x is y), None) for y in leaves]
        backward.append(functools.partial(_gradients, tree, tuple(given)))
        own = [x[None] for x, i in zip(leaves, given, strict=True) if i is None]
        return y_BKD, facts, own

    places, saved = fixed[1], partition_spec((split.axes,))
    specs = split.args[: len(args)], (split.tokens, split.of_places(places))
    y_BLD, facts, own = split.mapped(
        on_shards, specs, (split.tokens, PartitionSpec(), saved)
    )(args, fixed)
    return (y_BLD, facts), (args, places, jax.tree_util.Partial(backward[-1], own))


def _gradients(
    tree: Any,
    given: tuple[int | None, ...],
    own: Sequence[Array],
    args: tuple[Array, ...],
    places: Sequence[InStack | None],
    dy_BKD: Array,
) -> tuple[Array, ...]:
    """Gradients of the arguments, from what the forward pass saved.

    Args:
      tree: structure of the derivative.
      given: for each of its leaves, its number among the arguments and the arrays of
        their places, or None.
      own: the other leaves.
      args: the arguments.
      places: of the arguments.
      dy_BKD: gradient of the outputs.
    """
    left, known = iter(own), (*args, *jax.tree.leaves(places))
    leaves = [next(left)[0] if i is None else known[i] for i in given]
    return jax.tree.unflatten(tree, leaves)(dy_BKD)


def _backward(
    split: MlpSplit, outputs: Outputs, saved: tuple, cotangents: tuple[Array, Any]
) -> tuple[None, tuple[Array, ...]]:
    del outputs
    args, places, backward = saved
    (own,), specs = backward.args, split.args[: len(args)]
    stacked, of_places = partition_spec((split.axes,)), split.of_places(places)
    in_specs = stacked, specs, of_places, split.tokens
    mapped = split.mapped(backward.func, in_specs, specs)
    return None, mapped(own, args, places, cotangents[0])


_run.defvjp(_forward, _backward)
