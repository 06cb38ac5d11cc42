"""Exchange of tokens between the devices that share the experts."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshpar.arrays import Array
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
        wide = _widened(x)
        size = self.ways * wide.nbytes
        _record(Move("all_gather", (EXPERT,), size, why, has_gradient=False))
        if has_gradient:
            why = f"gradients of {why}"
            _record(Move("reduce_scatter", (EXPERT,), size, why, in_backward=True))
        y = lax.all_gather(wide, EXPERT, tiled=True).astype(x.dtype)
        return checkpoint_name(y, EXPERT_ROWS)

    def scatter(self, x: Array, why: str) -> Array:
        """Sums x[n * T, ...] over the devices: the tokens [T, ...] of each.

        Communication: one reduce_scatter, (n-1)/n of x; an all_gather of its gradient.

        Args:
          x: this device's addend for the tokens of all devices.
          why: as in `Move`.
        """
        if self.ways == 1:
            return x
        wide = _widened(x)
        move = Move("reduce_scatter", (EXPERT,), wide.nbytes, why, has_gradient=False)
        _record(move._replace(is_saved=False))
        why = f"gradients of {why}"
        _record(Move("all_gather", (EXPERT,), wide.nbytes, why, in_backward=True))
        y = lax.psum_scatter(wide, EXPERT, scatter_dimension=0, tiled=True)
        return y.astype(x.dtype)


def _widened(x: Array) -> Array:
    """Casts to the dtype in which collectives of the platform move floats."""
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    wide = floating and traced_platform().widens_collectives
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if wide else x


def _record(move: Move) -> None:
    if (scope := current_scope()) is not None:
        scope.moves.append(move)
