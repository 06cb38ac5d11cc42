"""Orders in which `context` deals the tokens of a sequence to its devices.

Causal attention of later tokens is more work. In parts of equal length the last device
has the most of it; the other orders give every device early and late tokens.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from meshpar.arrays import Array
from meshpar.errors import LayoutError, nearest, shown
from meshpar.layouts.axes import CONTEXT
from meshpar.layouts.context_modes import ULYSSES

AUTO, CONTIGUOUS, ZIGZAG, STRIPED = "auto", "contiguous", "zigzag", "striped"

TOKEN_ORDERS = (AUTO, CONTIGUOUS, ZIGZAG, STRIPED)
"""Values of `context_order=`; the first is the default.

`contiguous` gives device r of n the r-th part of each sequence, `zigzag` the r-th and
the r-th last of 2 n parts, and `striped` every n-th token from the r-th on.

Source: Brandon et al., Striped Attention, arXiv:2311.09431; Llama Team, The Llama 3
  Herd of Models, arXiv:2407.21783, section 3.3.2 (2 n parts).
"""


def check_token_order(order: str) -> None:
    """Raises LayoutError for a value of `context_order=` that does not exist."""
    if order not in TOKEN_ORDERS:
        known = nearest(shown(order), TOKEN_ORDERS)
        raise LayoutError(f"context_order={shown(order)!r} ({known})")


def resolved_order(context: int, mode: str, order: str) -> str:
    """The order that `auto` stands for: zigzag wherever it evens out work."""
    if context == 1:
        return CONTIGUOUS
    if order != AUTO:
        return order
    return CONTIGUOUS if mode == ULYSSES else ZIGZAG


def check_length(length: int, context: int, order: str) -> None:
    """Raises LayoutError unless sequences divide into the parts of their order.

    Args:
      length: tokens of a whole sequence, a multiple of `context`.
      context: size of the axis.
      order: of the tokens.
    """
    if order == ZIGZAG and length % (2 * context):
        raise LayoutError(
            f"length={length} does not divide into the 2*{CONTEXT}={2 * context} parts "
            f"of context_order={ZIGZAG}; use a multiple of {2 * context}, or "
            f"context_order={CONTIGUOUS}"
        )


def positions_on(order: str, rank: Any, num: int, length: int, xp: Any = jnp) -> Any:
    """Places, in whole sequences, of the tokens of one device: [length], as the rank.

    Args:
      order: of the tokens.
      rank: number of the device along `context`, an integer scalar.
      num: size of the axis.
      length: tokens on each device.
      xp: numpy or jax.numpy.
    """
    own = xp.arange(length, dtype=rank.dtype)
    if order == STRIPED:
        return own * num + rank
    if order == ZIGZAG:
        part = length // 2
        late = own + (2 * num - 2 - rank) * part
        return xp.where(own < part, own + rank * part, late)
    return own + rank * length


def device_order(order: str, length: int, num: int) -> np.ndarray:
    """Places of the tokens of all devices, one device after another, int [length].

    Args:
      order: of the tokens.
      length: of a whole sequence.
      num: size of the axis.
    """
    ranks = np.arange(num)
    return np.concatenate(
        [positions_on(order, rank, num, length // num, np) for rank in ranks]
    )


def in_natural_order(x: Array, order: str, num: int, dim: int) -> Array:
    """Undoes `device_order`: a dim of whole sequences in their own order.

    Slices and transpositions alone, whose gradients are the same.

    Args:
      x: an array whose tokens are in the order of the devices.
      order: of the tokens.
      num: size of the axis.
      dim: the dim of the tokens.
    """
    lead, length, rest = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    if order == STRIPED:
        parts = x.reshape(*lead, num, length // num, *rest)
        return parts.swapaxes(dim, dim + 1).reshape(x.shape)
    if order == ZIGZAG:
        parts = x.reshape(*lead, num, 2, length // (2 * num), *rest)
        early, late = jnp.moveaxis(parts, dim + 1, 0)
        both = jnp.concatenate([early, jnp.flip(late, dim)], dim)
        return both.reshape(x.shape)
    return x
