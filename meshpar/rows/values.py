"""Abstract values of the row analysis: how a number depends on rows of the batch.

A value is `Fixed` (the same in every part of the batch), `Counted` (it holds no data of
the batch, but parts would make it otherwise), `Key` (the random key of the loss),
`PerRow` (one entry per row), `Summed` (added up over rows), `Ratio` (a sum over a sum)
or `Mixed` (anything else). A degree is a power of the number of rows: a sum over rows
has degree 0, their mean degree -1.
"""

from typing import Any, NamedTuple

import numpy as np


class Fixed(NamedTuple):
    """A value that neither the batch nor the number of a row changes.

    Attributes:
      known: its value, if it is small.
      degree: power of the number of rows among its factors.
    """

    known: Any = None
    degree: int = 0


class Counted(NamedTuple):
    """A value without data of the batch that depends on numbers of rows.

    Each part of the batch would make it for itself, from its own first row on.

    Attributes:
      cause: why, for a reader.
      known: its value, if it is small.
      place: the line of the user that makes it.
    """

    cause: str
    known: Any = None
    place: str = ""


class Key(NamedTuple):
    """The random key that the loss is given, or keys made from it.

    What is drawn from it in the shape of rows belongs to the rows.
    """


class PerRow(NamedTuple):
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


EXACT, GUARDED, BOUNDED = FORMS = ("exact", "guarded", "bounded")
"""Forms of a sum: as it is; 1 where it is 0; otherwise chosen or bounded by its value.

A form includes those before it.
"""


class Summed(NamedTuple):
    """A sum over rows times the number of rows to the power of `degree`.

    Attributes:
      degree: 0 for a sum, -1 for a mean.
      form: one of `FORMS`.
      shift: the power of the number of rows in a constant that was added; None without.
    """

    degree: int = 0
    form: str = EXACT
    shift: int | None = None


class Ratio(NamedTuple):
    """A sum over rows, divided by another one of this form, shifted as `Summed` is."""

    degree: int = 0
    form: str = EXACT


class Inverse(NamedTuple):
    """One over a sum over rows."""

    degree: int = 0
    form: str = EXACT


class Test(NamedTuple):
    """A comparison of sums over rows; `of_zero` if it is that of one of them with 0."""

    of_zero: bool = False


class Mixed(NamedTuple):
    """A value that parts of the batch cannot give.

    Attributes:
      reason: why.
      remedy: what to do; "" for that of any loss that is no mean over rows.
      place: the line of the user that makes it.
    """

    reason: str
    remedy: str = ""
    place: str = ""


REDUCED = (Summed, Ratio, Inverse, Test)
"""Values that depend on all rows together."""

PLAIN = (Fixed, Counted)
"""Values without data of the batch."""

IN_BATCH = "put it into the batch, as an array with an entry for every row"
COUNTS = "it counts rows of the batch, which each part would do by itself"
BRANCHES = "what it computes depends on the number of rows"
NUMBER = "it computes with the number of rows, which is another one in each part"

ENTERS = Mixed(
    "a number computed from all rows enters single rows, as in batch normalization"
)
PICKED = Mixed(
    "it counts rows of the batch: single rows are picked by their number",
    "put a weight for every row into the batch, 0 for those that do not count",
)
COMBINED = Mixed("rows are combined with other rows")
CHOSEN = Mixed(
    "a number computed from all rows chooses between values, and each part of the "
    "batch would choose by its own",
    "choose row by row, or by a number that does not come from the batch",
)


def counts(value: Counted) -> Mixed:
    """The refused value of an operation on data and a value that counts rows."""
    remedy = OWN_KEY_REMEDY if value.cause == OWN_KEY else IN_BATCH
    return Mixed(value.cause, remedy, value.place)


OWN_KEY = "it draws a number for every row from a key of its own"
OWN_KEY_REMEDY = (
    "draw from the key that the loss is given (its argument `key`), or put the numbers "
    "into the batch"
)


def failed(error: Exception) -> Mixed:
    """The value of a step that the analysis cannot follow by an error of its own."""
    return Mixed(
        f"meshpar's analysis of rows fails at it ({type(error).__name__}: {error}), "
        "which is an error of meshpar, not of the loss",
        "please report it",
    )


def nonlinear(name: str) -> Mixed:
    """The result of a function of a sum over rows that is not linear."""
    return Mixed(f"{name} is applied to a number computed from all rows")


def is_zero(value: Any) -> bool:
    """Whether a value is known to be 0."""
    known = value.known if isinstance(value, Fixed) else None
    return known is not None and known.dtype.kind in "biufV" and not np.any(known)


def is_value(node: Any) -> bool:
    """Whether a node of a pytree is one of these values."""
    return type(node).__module__ == __name__


def degree_by_value(known: Any, prime: int) -> int:
    """The degree of a constant, guessed from its value."""
    if not known.size or known.dtype.kind not in "iufV":
        return 0
    number = abs(float(known.flat[0]))
    if not 0 < number < np.inf or np.any(known != known.flat[0]):
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
