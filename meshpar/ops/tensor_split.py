"""The split of column- and row-parallel matmuls, and its collectives.

Suffixes: B sequences, L their length, K a device's part of it, D features between
blocks, F those that devices split: one dim or more.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from meshpar.arrays import Array, num_bytes, vary
from meshpar.collectives.collective_matmul import (
    all_gather_matmul,
    contract,
    matmul_reduce_scatter,
    parts_of,
    weight_gradient,
    weight_gradient_of_parts,
)
from meshpar.collectives.transport import (
    Transports,
    transports_for,
)
from meshpar.layouts.scope import activation_axes, current_scope
from meshpar.mesh.order import zero_after

INTO = "activations into column-parallel matmuls"
OUT = "activations out of row-parallel matmuls"
"""Purposes of what sublayers move."""


def mapped_unchecked(
    fn: Callable, in_specs: Any, out_specs: Any, axes: Collection[str]
) -> Callable:
    """A function on the shards of each device, inside a shard_map over other axes.

    Steps of rings do not say that their result is equal on all devices, so nothing
    checks it, and the function needs a derivative of its own.

    Args:
      fn: the function of shards.
      in_specs: of its arguments, as of `jax.shard_map`.
      out_specs: of its results.
      axes: the automatic axes, which become manual inside.

    Returns:
      A function of arrays that vary alike over the axes outside; so do its results.
    """

    def run(*args: Any) -> Any:
        mapped = jax.shard_map(
            fn,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(axes),
            check_vma=False,
        )
        outside = jax.typeof(jax.tree.leaves(args)[0]).manual_axis_type.varying
        return jax.tree.map(lambda x: vary(x, tuple(outside)), mapped(*args))

    return run


@dataclasses.dataclass(frozen=True)
class MatmulSplit:
    """The split of a matmul over devices.

    Attributes:
      axis: the mesh axis that splits the length between blocks, and the weight.
      ways: its size.
      automatic: all axes that are automatic around the matmul.
      transports: how activations move along the axis.
    """

    axis: str
    ways: int
    automatic: frozenset[str]
    transports: Transports

    @classmethod
    def of(
        cls, x: Array, embed: str, features: Sequence[str], size: int
    ) -> "MatmulSplit | None":
        """The split under the layout in use; None to leave it to the compiler.

        Args:
          x: [B, L, ...].
          embed: name of the dim of features between blocks.
          features: names of the other dims of the weight; devices split the first.
          size: of that.
        """
        scope = current_scope()
        if scope is None:
            return None

        def axes_of(*names: str) -> tuple[tuple[str, ...], ...]:
            return activation_axes(scope, names, "tensor_parallel")

        (between,) = axes_of("residual_length")
        first, *others = axes_of(*features)
        whole = not any((*axes_of("length", embed), *others))
        rules = dict(scope.layout.param_rules).get(features[0], ())
        if (
            len(between) != 1
            or first != between
            or not whole
            or between[0] not in rules
        ):
            return None
        (axis,) = between
        ways, alone = scope.mesh.shape[axis], not scope.manual_axes
        # Without a shard_map around it, other axes would have to be split here, too.
        if x.shape[1] % ways or size % ways or (alone and ways < scope.mesh.size):
            return None
        automatic = frozenset(scope.mesh.axis_names) - scope.manual_axes
        return cls(axis, ways, automatic, transports_for(scope.mesh, between))

    @property
    def rings(self) -> bool:
        """Whether the steps of a ring hide beside matmuls."""
        return self.transports.gradients.covers((self.axis,))

    @property
    def sums_parts(self) -> bool:
        """Whether gradients of weights are summed over the parts of a ring.

        Elsewhere an all_gather of its own, which hides, brings the whole activation.
        """
        return self.rings and self.transports.weights.covers((self.axis,))

    @property
    def merges_dims(self) -> bool:
        """Whether matmuls of parts merge dims such as heads and head_dim.

        Where an all_gather hides (v5e), a compiler then needs a fifth less time for the
        step, which takes at most 0.8% longer. On v5p it would take 7% longer.
        """
        return self.rings and not self.sums_parts

    def mapped(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """The function on the shards of each device."""
        return mapped_unchecked(fn, in_specs, out_specs, self.automatic)

    # Inside shard_map.

    def gathered(
        self, x_BKD: Array, weights: Sequence[Array]
    ) -> tuple[list[Array], list[Array]]:
        """Multiplies an activation by weights, and gives what their gradients need.

        Args:
          x_BKD: this device's part.
          weights: w[D, F] each.

        Returns:
          (y[B, L, F] of every weight, the parts of x, or the whole as the only one).
        """
        if not self.rings:
            x_BLD = self.whole(x_BKD)
            return [contract(x_BLD, w) for w in weights], [x_BLD]
        merged = [w.reshape(len(w), -1) if self.merges_dims else w for w in weights]
        ys, parts = all_gather_matmul(x_BKD, merged, self.axis)
        pairs = zip(ys, weights, strict=True)
        ys = [y.reshape(*y.shape[:2], *w.shape[1:]) for y, w in pairs]
        if self.sums_parts:
            return ys, parts
        # Little compute may stand beside the ring; an all_gather beside it has none.
        return ys, [self.whole(x_BKD, after=parts[-1])]

    def parts(self, x_BKD: Array, after: Array) -> list[Array]:
        """The parts of an activation, or the whole as the only one.

        Args:
          x_BKD: this device's part.
          after: what the steps of a ring wait for.
        """
        if not self.sums_parts:
            return [self.whole(x_BKD)]
        return parts_of(x_BKD + zero_after(after).astype(x_BKD.dtype), self.axis)

    def weight_gradient(self, parts: list[Array], y: Array, first: bool) -> Array:
        """The gradient of a weight between x, of which these are the parts, and y.

        Args:
          parts: of x, as `gathered` and `parts` give them.
          y: activations with the whole length.
          first: whether the dims of x are the first of the weight.
        """
        if len(parts) > 1:
            return weight_gradient_of_parts(parts, y, self.axis, first)
        (x,) = parts
        return weight_gradient(x, y) if first else weight_gradient(y, x)

    def whole(self, x_BKD: Array, after: Array | None = None) -> Array:
        """An activation with the whole length.

        Args:
          x_BKD: this device's part.
          after: what the gather waits for, if anything.
        """
        if after is not None:
            x_BKD += zero_after(after).astype(x_BKD.dtype)
        x = x_BKD.astype(self.transports.wire_dtype(x_BKD.dtype))
        transport = self.transports.weights.for_gathers(self.ways * num_bytes(x))
        return transport.all_gather(x, (self.axis,), 1).astype(x_BKD.dtype)

    def scattered(self, ys: Sequence[Array], weights: Sequence[Array]) -> Array:
        """This device's part of the sum of all y[B, L, F] w[F, D]."""
        if self.merges_dims:
            ys = [y.reshape(*y.shape[:2], -1) for y in ys]
            weights = [w.reshape(-1, w.shape[-1]) for w in weights]
        if self.rings:
            return matmul_reduce_scatter(ys, weights, self.axis)
        dtype = self.transports.wire_dtype(ys[0].dtype)
        pairs = zip(ys, weights, strict=True)
        x = sum(contract(y, w, w.ndim - 1, dtype) for y, w in pairs)
        x = self.transports.gradients.reduce_scatter(x, (self.axis,), 1)
        return x.astype(ys[0].dtype)
