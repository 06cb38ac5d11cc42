"""Finds values without data of the batch that are equal in all of its parts.

A part has fewer rows than the batch and counts them from 0. So what is made for each
row has to be equal for all rows, and what the number of rows goes into has to be a
power of it, as in a mean; all else is `Counted`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshpar.rows.arithmetic import MOVES, TESTS
from meshpar.rows.dims import truncates
from meshpar.rows.folding import folded
from meshpar.rows.shapes import row_dims
from meshpar.rows.values import (
    COUNTS,
    NUMBER,
    Counted,
    Fixed,
    PerRow,
    is_zero,
)

_KEEP = frozenset(
    ("broadcast_in_dim", "reshape", "transpose", "squeeze", "copy", "copy_p")
    + ("split", "unstack", "expand_dims", "rev")
)
"""Primitives that make no differences between rows, beside elementwise ones."""

_REARRANGE = _KEEP | frozenset(
    ("slice", "dynamic_slice", "gather", "reduce_max", "reduce_min", "add", "sub")
    + ("add_any", "max", "min", "select_n", "concatenate", "stack", "pad", "clamp")
)
"""Primitives whose result has the degree that all operands have."""

_LOSE = frozenset(("argmax", "argmin", "reduce_and", "reduce_or", "sign"))
"""Primitives whose result does not change with a positive factor of the operand."""


def plain_results(
    eqn: Any,
    values: Sequence[Any],
    prime: int,
    is_elementwise: bool,
    as_rows: Callable[[list[Any]], list[Any]],
) -> list[Any]:
    """The results of an equation whose operands hold no data of the batch.

    Args:
      eqn: an equation of a jaxpr.
      values: `Fixed` or `Counted`, one for each operand.
      prime: the number of rows.
      is_elementwise: whether the equation works on each entry by itself.
      as_rows: evaluates the equation on other values: what holds for rows of the batch
        tells whether equal rows stay equal.
    """
    known = folded(eqn, [v.known for v in values])
    if counted := next((v for v in values if isinstance(v, Counted)), None):
        return [counted._replace(known=known)] * len(eqn.outvars)
    held = [row_dims(v.aval, prime) for v in eqn.outvars]
    if eqn.primitive.name == "iota":
        counts = eqn.params["dimension"] in held[0]
        return [Counted(COUNTS, known) if counts else Fixed(known)]
    degree = _degree(eqn, values, prime)
    if degree is None:
        return [Counted(NUMBER, known)] * len(held)
    if not any(held):
        return [Fixed(known, degree)] * len(held)
    if known is not None:
        is_equal = all(_equal_rows(known, dim, prime) for dim in held[0])
        return [Fixed(known, degree) if is_equal else Counted(COUNTS, known)]
    if is_elementwise or eqn.primitive.name in _KEEP:
        return [Fixed(None, degree)] * len(held)
    rows = [_as_rows(v.aval, x, prime) for v, x in zip(eqn.invars, values, strict=True)]
    if not any(isinstance(v, PerRow) for v in rows) or None in rows:
        return [Counted(COUNTS)] * len(held)
    return [
        Fixed(None, degree) if isinstance(v, PerRow) else Counted(COUNTS)
        for v in as_rows(rows)
    ]


def equal_constant(value: Any, known: Any, degree: int | None, prime: int) -> Any:
    """Classifies a constant of a jaxpr: fixed, or dependent on the number of rows.

    Args:
      value: the array.
      known: its value if it is small; else None.
      degree: power of the number of rows among its factors; None if it depends on
        that number in another way.
      prime: the number of rows.
    """
    if degree is None:
        return Counted(NUMBER, known)
    held = row_dims(value, prime)
    if held and not all(_equal_rows(np.asarray(value), dim, prime) for dim in held):
        return Counted(COUNTS, known)
    return Fixed(known, degree)


def _as_rows(aval: Any, value: Any, prime: int) -> Any:
    """An operand as if it held data of rows; None if it has several dims of rows."""
    held = row_dims(aval, prime)
    if not held:
        return value
    (dim, *more) = held
    return None if more else PerRow(dim, aval.shape[dim] // prime)


def _equal_rows(known: Any, dim: int, prime: int) -> bool:
    """Whether an array is equal for all rows, before or after another dim in theirs."""
    x = np.moveaxis(known, dim, 0)
    rest, is_float = x.shape[1:], x.dtype.kind in "fc"
    by_row = x.reshape(prime, -1, *rest), x.reshape(-1, prime, *rest).swapaxes(0, 1)
    return any(
        np.array_equal(rows, np.broadcast_to(rows[:1], rows.shape), equal_nan=is_float)
        for rows in by_row
    )


def _degree(eqn: Any, values: Sequence[Any], prime: int) -> int | None:
    """The power of the number of rows in a result; None for another function of it."""
    name, degrees = eqn.primitive.name, [v.degree for v in values]
    if name == "reduce_sum":
        held = row_dims(eqn.invars[0].aval, prime)
        return degrees[0] + len({*held} & {*eqn.params["axes"]})
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        held = row_dims(eqn.invars[0].aval, prime)
        return sum(degrees) + len({*held} & {*contracted})
    if name in ("reduce_prod", "cumprod"):
        held = row_dims(eqn.invars[0].aval, prime)
        return None if held or any(degrees) else 0
    return _of_factors(name, values, prime, eqn) if any(degrees) else 0


def _of_factors(name: str, values: Sequence[Any], prime: int, eqn: Any) -> int | None:
    """The degree of a result, from the degrees of its operands."""
    degrees = [v.degree for v in values]
    if truncates(eqn):
        return None
    if name in MOVES or name in _LOSE:
        return 0 if name in _LOSE else degrees[0]
    if name == "mul":
        return sum(degrees)
    if name == "div":
        is_float = np.issubdtype(eqn.outvars[0].aval.dtype, np.integer) is False
        equal = degrees[0] == degrees[1]
        return degrees[0] - degrees[1] if is_float or equal else None
    if name in ("integer_pow", "square"):
        return degrees[0] * eqn.params.get("y", 2)
    if name in TESTS:
        return 0 if any(map(is_zero, values)) or len({*degrees}) == 1 else None
    if name == "max" and _exceeds(*values, prime):
        return 1
    if name in _REARRANGE:
        data = _chosen(*values) if name == "select_n" else values
        used = {v.degree for v in data if not is_zero(v)}
        return used.pop() if len(used) == 1 else None
    return None


def _chosen(which: Any, *cases: Any) -> Sequence[Any]:
    """The cases that a selection may take."""
    if which.known is None or np.unique(which.known).size != 1:
        return cases
    return [cases[int(which.known.flat[0])]]


def _exceeds(first: Any, second: Any, prime: int) -> bool:
    """Whether a value that grows with the rows exceeds the other for even one row."""
    if first.degree == 0:
        first, second = second, first
    if (first.degree, second.degree) != (1, 0) or None in (first.known, second.known):
        return False
    return bool(np.all(np.asarray(second.known) <= np.asarray(first.known) / prime))
