"""Rows of a stack of layers, and gradients that are added to them."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array, Params
from meshpar.mesh.platform import traced_platform


class Rows(NamedTuple):
    """Consecutive rows of a stack.

    Attributes:
      start: the first row.
      numbers: [rows] the layer in every row, negative for padding.
    """

    start: int | Array
    numbers: Array


def add_to_row(sums: Params, new: Params, row: Array, on: Array | None) -> Params:
    """Adds the gradient of one layer to its row of the sums, if `on`."""
    in_place = traced_platform().adds_rows_in_place
    result = {}
    for path, total in sums.items():
        addend = new[path].astype(total.dtype)
        addend = addend if on is None else jnp.where(on, addend, 0)
        if in_place and len(total) > 1:  # One row alone is no slice.
            result[path] = total.at[row].add(addend, mode="promise_in_bounds")
            continue
        before = lax.dynamic_index_in_dim(total, row, keepdims=False)
        result[path] = lax.dynamic_update_index_in_dim(total, before + addend, row, 0)
    return result
