"""Rows moved to slots and back; forward and backward passes only gather.

A scatter of rows is slow on accelerators. The transpose of a gather is a scatter, but
where every slot holds one row at most, it is a gather by the inverse index.
"""

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


@jax.custom_vjp
def take_rows(x: Array, index: Array, inverse: Array) -> Array:
    """Sums of rows: y[i] = x[index[i, 0]] + x[index[i, 1]] + ...

    x[N, ...], index[M, ...] -> y[M, ...]. A number beyond the last row adds zeros.

    Args:
      x: rows.
      index: int32 [M, P], the rows of x that make up each row of y.
      inverse: int32 [N, Q], the rows of y that each row of x is part of.
    """
    if len(index) >= _MANY * len(x):
        x = jnp.concatenate([x, jnp.zeros_like(x, shape=(1, *x.shape[1:]))])
        taken = x.at[index].get(mode="clip")
    else:
        taken = x.at[index].get(mode="fill", fill_value=0)
    if index.shape[1] == 1:
        return taken[:, 0]
    return jnp.sum(taken, axis=1, dtype=jnp.float32).astype(x.dtype)


def _forward(x: Array, index: Array, inverse: Array) -> tuple[Array, tuple]:
    return take_rows(x, index, inverse), (index, inverse)


def _backward(indices: tuple[Array, Array], dy: Array) -> tuple[Array, None, None]:
    index, inverse = indices
    return take_rows(dy, inverse, index), None, None


take_rows.defvjp(_forward, _backward)
