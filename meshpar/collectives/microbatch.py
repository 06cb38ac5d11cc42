"""Microbatches: strided slices of a batch, for gradient accumulation and pipelines."""

from typing import Any

import jax.numpy as jnp

from meshpar.arrays import Array
from meshpar.replicated import map_rows


def split_microbatches(batch: Any, num_microbatches: int) -> Any:
    """Splits a batch into strided microbatches without moving data between devices.

    x[B, ...] -> x[M, B/M, ...]. Microbatch m holds the rows m, m+M, m+2M, ... A
    contiguous split of a sharded batch would cost an all_to_all. Each microbatch gets
    the leaves without rows as they are.

    Args:
      batch: pytree of arrays with leading dim B, scalars and `Replicated` arrays.
      num_microbatches: M; divides B.

    Returns:
      The same tree of arrays [M, B/M, ...]; [M, ...] of those without rows.
    """

    def strided(x_B: Array) -> Array:
        rest = x_B.shape[1:]
        x_BM = x_B.reshape(x_B.shape[0] // num_microbatches, num_microbatches, *rest)
        return x_BM.swapaxes(0, 1)

    def repeated(x: Array) -> Array:
        return jnp.broadcast_to(x, (num_microbatches, *jnp.shape(x)))

    return map_rows(strided, batch, others=repeated)
