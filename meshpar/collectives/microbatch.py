"""Microbatches: strided slices of a batch, for gradient accumulation and pipelines."""

from typing import Any

import jax

from meshpar.arrays import Array


def split_microbatches(batch: Any, num_microbatches: int) -> Any:
    """Splits a batch into strided microbatches without moving data between devices.

    x[B, ...] -> x[M, B/M, ...]. Microbatch m holds the rows m, m+M, m+2M, ... A
    contiguous split of a sharded batch would cost an all_to_all.

    Args:
      batch: pytree of arrays with leading dim B; scalars are not allowed.
      num_microbatches: M; divides B.

    Returns:
      The same tree of arrays [M, B/M, ...].
    """

    def strided(x_B: Array) -> Array:
        rest = x_B.shape[1:]
        x_BM = x_B.reshape(x_B.shape[0] // num_microbatches, num_microbatches, *rest)
        return x_BM.swapaxes(0, 1)

    return jax.tree.map(strided, batch)
