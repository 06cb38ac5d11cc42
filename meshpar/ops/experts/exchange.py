"""Exchange of tokens between the devices that share the experts."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshpar.arrays import Array
from meshpar.collectives.transport import ONE_SHOT, Transport, transports_for
from meshpar.contracts.purposes import purpose, unsplit
from meshpar.layouts.axes import EXPERT
from meshpar.layouts.remat import EXPERT_ROWS
from meshpar.layouts.scope import current_scope
from meshpar.mesh.platform import traced_platform


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Sends rows to the devices that hold their experts; call inside shard_map.

    Attributes:
      ways: devices along `expert`, or 1 where every device has all experts.
    """

    ways: int

    def swap(self, x: Array, why: str, is_saved: bool = True) -> Array:
        """x[j] of every device goes to device j: x[n, ...] -> y[n, ...] by source.

        Communication: one all_to_all of x, (n-1)/n of its bytes sent.

        Args:
          x: a part for each device.
          why: the purpose, for reports.
          is_saved: whether the backward pass needs the result.
        """
        if self.ways == 1:
            return x
        with purpose(why), unsplit():
            y = lax.all_to_all(
                widened(x), EXPERT, split_axis=0, concat_axis=0, tiled=True
            )
        y = y.astype(x.dtype)
        return checkpoint_name(y, EXPERT_ROWS) if is_saved else y

    def gather(self, x: Array, why: str, has_gradient: bool = True) -> Array:
        """Joins x[T, ...] of every device: [n * T, ...].

        Communication: one all_gather, (n-1)/n of the result; a reduce_scatter of its
        gradient.

        Args:
          x: of this device's tokens.
          why: the purpose, for reports.
          has_gradient: whether x has one.
        """
        if self.ways == 1:
            return x
        wide, (gather, scatter) = widened(x), _moves(_transport())
        with purpose(why), unsplit():
            y = with_transpose(gather, scatter)(wide) if has_gradient else gather(wide)
        return checkpoint_name(y.astype(x.dtype), EXPERT_ROWS)

    def scatter(self, x: Array, why: str) -> Array:
        """Sums x[n * T, ...] over the devices: the tokens [T, ...] of each.

        Communication: one reduce_scatter, (n-1)/n of x; an all_gather of its gradient.

        Args:
          x: this device's addend for the tokens of all devices.
          why: the purpose, for reports.
        """
        if self.ways == 1:
            return x
        gather, scatter = _moves(_transport())
        with purpose(why), unsplit():
            return with_transpose(scatter, gather)(widened(x)).astype(x.dtype)


Collective = Callable[[Array], Array]
"""Moves an array between devices, inside shard_map."""


def _transport() -> Transport:
    """The transport of tokens: rings on TPUs, which pad parts of a reduce_scatter."""
    if (scope := current_scope()) is None:
        return ONE_SHOT
    return transports_for(scope.mesh, (EXPERT,)).gradients


def _moves(transport: Transport) -> tuple[Collective, Collective]:
    """(all_gather, reduce_scatter) of tokens along `expert`."""

    def gather(x: Array) -> Array:
        size = lax.axis_size(EXPERT) * x.nbytes
        return transport.for_gathers(size).all_gather(x, (EXPERT,), 0)

    return gather, lambda x: transport.reduce_scatter(x, (EXPERT,))


def with_transpose(fn: Collective, transpose: Collective) -> Collective:
    """A linear function with its transpose."""
    run = jax.custom_vjp(fn)
    run.defvjp(lambda x: (fn(x), None), lambda _, dy: (transpose(dy),))
    return run


def widened(x: Array) -> Array:
    """Casts to the dtype in which collectives of the platform move floats."""
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    wide = floating and traced_platform().widens_collectives
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if wide else x
