"""Rows moved to slots and back; forward and backward passes only gather.

A scatter of rows is slow on accelerators. The transpose of a gather is a scatter, but
where every slot holds one row at most, it is a gather by the inverse index.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshpar.arrays import Array

_MANY = 4
"""Times that rows are taken, from which on a copy of them with a row of zeros costs
less than a mask of all that are taken (measured on TPU programs)."""


def inverse_index(slots: Array, num_slots: int) -> Array:
    """The entry that went to each slot; the number of entries where a slot is empty.

    Args:
      slots: [entries] the slot of each, or `num_slots` for none; no slot twice.
      num_slots: number of slots.
    """
    empty = jnp.full_like(slots, len(slots), shape=(num_slots,))
    return empty.at[slots].set(jnp.arange(len(slots)), mode="drop")


class Missing(NamedTuple):
    """Meaning of the entries of an index beyond the last row.

    Zeros cost a pass over memory. Other rows do for slots that are empty, if what is
    made of them is multiplied by zeros or not read.

    Attributes:
      are_zeros: whether y needs zeros for them, in `take_rows`.
      gradients_are_zeros: whether the gradient of x does.
    """

    are_zeros: bool = True
    gradients_are_zeros: bool = True


ZEROS = Missing()
"""Entries beyond the last row are zeros, in both directions."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def take_rows(
    x: Array, index: Array, inverse: Array, missing: Missing = ZEROS
) -> Array:
    """Sums of rows: y[i] = x[index[i, 0]] + x[index[i, 1]] + ...

    x[N, ...], index[M, ...] -> y[M, ...]. A number beyond the last row adds zeros,
    unless `missing` says that any row will do.

    Args:
      x: rows.
      index: int32 [M, P], the rows of x that make up each row of y.
      inverse: int32 [N, Q], the rows of y that each row of x is part of.
      missing: of `index`, and of `inverse`.
    """
    index = index.T  # Compilers add whole tiles then.
    if not missing.are_zeros:
        taken = x.at[index].get(mode="clip")
    elif index.shape[1] >= _MANY * len(x):
        x = jnp.concatenate([x, jnp.zeros_like(x, shape=(1, *x.shape[1:]))])
        taken = x.at[index].get(mode="clip")
    else:
        taken = x.at[index].get(mode="fill", fill_value=0)
    if len(index) == 1:
        return taken[0]
    # Written as additions: a reduction of so few rows is slower on TPUs.
    parts = (taken[i].astype(jnp.float32) for i in range(len(index)))
    return functools.reduce(jnp.add, parts).astype(x.dtype)


def _forward(
    x: Array, index: Array, inverse: Array, missing: Missing
) -> tuple[Array, tuple]:
    return take_rows(x, index, inverse, missing), (index, inverse)


def _backward(
    missing: Missing, indices: tuple[Array, Array], dy: Array
) -> tuple[Array, None, None]:
    index, inverse = indices
    return take_rows(dy, inverse, index, Missing(*missing[::-1])), None, None


take_rows.defvjp(_forward, _backward)
