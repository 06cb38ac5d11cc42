"""How a number inside a loss depends on the rows of the batch.

A value is `Fixed` (independent of the batch), `Rows` (one entry per row), `Summed`
(added up over rows), `Ratio` (a sum over a sum) or `Mixed` (anything else). A degree is
a power of the number of rows: a sum over rows has degree 0, their mean degree -1.
"""

from typing import Any, NamedTuple

import numpy as np


class Fixed(NamedTuple):
    """A value that does not depend on the batch; `known` is its value, if small."""

    known: Any = None


class Rows(NamedTuple):
    """A value whose rows depend on the same rows of the batch alone.

    Attributes:
      dim: the dim that holds the rows.
      inner: entries of that dim per row, where rows come before another dim in it.
      degree: power of the number of rows among its factors.
      is_ratio: whether it is divided by a sum over rows.
      columns: values along the last dim, for an array of indices.
    """

    dim: int
    inner: int = 1
    degree: int = 0
    is_ratio: bool = False
    columns: tuple[Any, ...] = ()


class Summed(NamedTuple):
    """A sum over rows times the number of rows to the power of `degree`.

    Attributes:
      degree: 0 for a sum, -1 for a mean.
      form: "exact", "shifted" (plus a constant) or "guarded" (kept away from 0).
    """

    degree: int = 0
    form: str = "exact"


class Ratio(NamedTuple):
    """A sum over rows, divided by another one."""

    degree: int = 0


class Inverse(NamedTuple):
    """One over a sum over rows."""

    degree: int = 0


class Test(NamedTuple):
    """A comparison of sums over rows, such as that of a weight with 0."""


class Mixed(NamedTuple):
    """A value that no rule covers, and the reason."""

    reason: str


REDUCED = (Summed, Ratio, Inverse, Test)
"""Values that depend on all rows together."""

ENTERS = Mixed(
    "a number computed from all rows enters single rows, as in batch normalization"
)
PICKED = Mixed("single rows are picked by their number")
COMBINED = Mixed("rows are combined with other rows")


def nonlinear(name: str) -> Mixed:
    """The result of a function of a sum over rows that is not linear."""
    return Mixed(f"{name} is applied to a number computed from all rows")


def is_zero(value: Any) -> bool:
    """Whether a value is known to be 0."""
    known = value.known if isinstance(value, Fixed) else None
    return known is not None and known.dtype.kind in "biufV" and not np.any(known)


def degree_of(value: Any, prime: int) -> int:
    """The power of the number of rows in a constant factor."""
    if not isinstance(value, Fixed) or value.known is None or not value.known.size:
        return 0
    number = abs(float(value.known.flat[0]))
    if not 0 < number < np.inf or np.any(value.known != value.known.flat[0]):
        return 0
    for sign, factor in ((1, number), (-1, 1 / number)):
        degree = 0
        while _is_multiple(factor, prime):
            factor, degree = factor / prime, degree + 1
        if degree:
            return sign * degree
    return 0


def _is_multiple(number: float, prime: int) -> bool:
    """Whether a number is a multiple of half the prime, up to float32 rounding."""
    times = 2 * number / prime
    exact = number < 2**24 and number == round(number)
    tolerance = 1e-12 if exact else 1.2e-7
    return round(times) > 0 and abs(times - round(times)) <= tolerance * times
