"""Exchange of tokens between the devices that share the experts."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshpar.arrays import Array
from meshpar.collectives.transport import ONE_SHOT, Transport, transports_for
from meshpar.layouts.axes import EXPERT
from meshpar.layouts.moves import Move
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

    def swap(
        self, x: Array, why: str, has_gradient: bool = True, is_saved: bool = True
    ) -> Array:
        """x[j] of every device goes to device j: x[n, ...] -> y[n, ...] by source.

        Communication: one all_to_all of x, (n-1)/n of its bytes sent.

        Args:
          x: a part for each device.
          why: as in `Move`.
          has_gradient: as in `Move`.
          is_saved: as in `Move`.
        """
        if self.ways == 1:
            return x
        wide = _widened(x)
        _record(Move("all_to_all", (EXPERT,), wide.nbytes, why, has_gradient, is_saved))
        y = lax.all_to_all(wide, EXPERT, split_axis=0, concat_axis=0, tiled=True)
        y = y.astype(x.dtype)
        return checkpoint_name(y, EXPERT_ROWS) if is_saved else y

    def gather(self, x: Array, why: str, has_gradient: bool = True) -> Array:
        """Joins x[T, ...] of every device: [n * T, ...].

        Communication: one all_gather, (n-1)/n of the result; a reduce_scatter of its
        gradient.

        Args:
          x: of this device's tokens.
          why: as in `Move`.
          has_gradient: as in `Move`.
        """
        if self.ways == 1:
            return x
        wide, transport = _widened(x), _transport()
        size = self.ways * wide.nbytes
        self._record(transport, "all_gather", size, why, is_saved=True)
        if has_gradient:
            back = f"gradients of {why}"
            self._record(transport, "reduce_scatter", size, back, in_backward=True)
        gather, scatter = _moves(transport)
        y = _with_gradient(gather, scatter)(wide) if has_gradient else gather(wide)
        return checkpoint_name(y.astype(x.dtype), EXPERT_ROWS)

    def scatter(self, x: Array, why: str) -> Array:
        """Sums x[n * T, ...] over the devices: the tokens [T, ...] of each.

        Communication: one reduce_scatter, (n-1)/n of x; an all_gather of its gradient.

        Args:
          x: this device's addend for the tokens of all devices.
          why: as in `Move`.
        """
        if self.ways == 1:
            return x
        wide, transport, back = _widened(x), _transport(), f"gradients of {why}"
        self._record(transport, "reduce_scatter", wide.nbytes, why)
        self._record(transport, "all_gather", wide.nbytes, back, in_backward=True)
        gather, scatter = _moves(transport)
        return _with_gradient(scatter, gather)(wide).astype(x.dtype)

    def _record(
        self,
        transport: Transport,
        kind: str,
        size: int,
        why: str,
        is_saved: bool = False,
        in_backward: bool = False,
    ) -> None:
        """Notes the collectives that move tokens of `size` bytes in all."""
        if kind == "all_gather":
            transport = transport.for_gathers(size)
        movement = transport.declare(kind, (EXPERT,), self.ways, size)
        why = f"{why}, {movement.note}" if movement.note else why
        size = movement.payload_bytes
        move = Move(movement.kind, (EXPERT,), size, why, False, is_saved)
        _record(move._replace(times=movement.count, in_backward=in_backward))


_Collective = Callable[[Array], Array]


def _transport() -> Transport:
    """How tokens move: around rings on TPUs, which pad parts of a reduce_scatter."""
    if (scope := current_scope()) is None:
        return ONE_SHOT
    return transports_for(scope.mesh, (EXPERT,)).gradients


def _moves(transport: Transport) -> tuple[_Collective, _Collective]:
    """(all_gather, reduce_scatter) of tokens along `expert`."""

    def gather(x: Array) -> Array:
        size = lax.axis_size(EXPERT) * x.nbytes
        return transport.for_gathers(size).all_gather(x, (EXPERT,), 0)

    return gather, lambda x: transport.reduce_scatter(x, (EXPERT,))


def _with_gradient(fn: _Collective, transpose: _Collective) -> _Collective:
    """A linear function with its transpose."""
    run = jax.custom_vjp(fn)
    run.defvjp(lambda x: (fn(x), None), lambda _, dy: (transpose(dy),))
    return run


def _widened(x: Array) -> Array:
    """Casts to the dtype in which collectives of the platform move floats."""
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    wide = floating and traced_platform().widens_collectives
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if wide else x


def _record(move: Move) -> None:
    if (scope := current_scope()) is not None:
        scope.moves.append(move)
