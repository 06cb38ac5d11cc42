"""Exchange of tokens between the devices that share the experts: one all_to_all."""

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
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        dtype = x.dtype
        if floating and traced_platform().widens_collectives:
            x = x.astype(jnp.promote_types(dtype, jnp.float32))
        if (scope := current_scope()) is not None:
            scope.moves.append(
                Move("all_to_all", (EXPERT,), x.nbytes, why, has_gradient, is_saved)
            )
        y = lax.all_to_all(x, EXPERT, split_axis=0, concat_axis=0, tiled=True)
        y = y.astype(dtype)
        return checkpoint_name(y, EXPERT_ROWS) if is_saved else y
