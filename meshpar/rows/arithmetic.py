"""Arithmetic of values that depend on the rows of a batch (`rows.values`)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshpar.rows.values import (
    BOUNDED,
    CHOSEN,
    COMBINED,
    ENTERS,
    EXACT,
    FORMS,
    GUARDED,
    IN_BATCH,
    NUMBER,
    PLAIN,
    REDUCED,
    Counted,
    Fixed,
    Inverse,
    Key,
    Mixed,
    PerRow,
    Ratio,
    Summed,
    Test,
    counts,
    is_zero,
    nonlinear,
)

MOVES = frozenset(
    ("neg", "convert_element_type", "copy", "copy_p", "sharding_constraint")
    + ("reduce_precision", "pvary", "pcast", "optimization_barrier")
    + ("stop_gradient", "real")
)
"""Primitives of one operand that keep sums sums."""

TESTS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))
"""Comparisons of two numbers."""

_LOGIC = frozenset(("and", "or", "not", "xor"))
_ADDS = frozenset(("add", "sub", "add_any"))
_EPSILON = 1e-6
"""Largest constant whose place among sums and means changes nothing but rounding."""

_OF_NUMBER = Mixed(NUMBER, IN_BATCH)


def elementwise(name: str, values: Sequence[Any]) -> Any:
    """The value of an elementwise primitive, or of one that moves numbers only.

    Args:
      name: of the primitive.
      values: of its operands, not all of them `Fixed`, none of them `Counted`.
    """
    if mixed := next((v for v in values if isinstance(v, Mixed)), None):
        return mixed
    has_rows = any(isinstance(v, PerRow) for v in values)
    if not any(isinstance(v, REDUCED) for v in values):
        return _of_rows(name, values)
    return _scaled(name, values) if has_rows else _of_sums(name, values)


def _of_rows(name: str, values: Sequence[Any]) -> Any:
    """Arithmetic of `PerRow` with `Fixed`."""
    rows = [v for v in values if isinstance(v, PerRow)]
    if len({(v.dim, v.inner) for v in rows}) > 1:
        return COMBINED
    first, *_ = rows
    plain = PerRow(first.dim, first.inner)
    if name in MOVES:
        return first._replace(columns=())
    if name in ("mul", "div"):
        signs = (1, -1 if name == "div" else 1)
        degree = sum(sign * v.degree for sign, v in zip(signs, values, strict=True))
        ratios = [isinstance(v, PerRow) and v.is_ratio for v in values]
        if sum(ratios) > 1 or (name == "div" and ratios[1]):
            return nonlinear(name)
        return plain._replace(degree=degree, is_ratio=any(ratios))
    factors = {(v.degree, v.is_ratio) for v in rows}
    others = [v for v in values if isinstance(v, Fixed)]
    if factors == {(0, False)}:
        odd = any(v.degree and not is_zero(v) for v in others)
        return _OF_NUMBER if odd else plain
    linear = name in _ADDS or (name == "select_n" and isinstance(values[0], Fixed))
    if name == "select_n":
        others, factors = _cases(values)
        linear = True
    if not linear or len(factors) > 1 or not all(map(is_zero, others)):
        return nonlinear(name)
    ((degree, is_ratio),) = factors
    return plain._replace(degree=degree, is_ratio=is_ratio)


def _cases(values: Sequence[Any]) -> tuple[list[Any], set[tuple[int, bool]]]:
    """Sorts the cases of a selection: the fixed ones, and factors of the others."""
    which, *cases = values
    factors = {(v.degree, v.is_ratio) for v in cases if isinstance(v, PerRow)}
    if isinstance(which, PerRow) and (which.degree or which.is_ratio):
        factors |= {(0, False), (1, True)}  # A choice by such a number is not linear.
    return [v for v in cases if isinstance(v, Fixed)], factors


def _scaled(name: str, values: Sequence[Any]) -> Any:
    """Divides rows by a sum over rows; any other operand mixes rows."""
    first, second = values[0], values[-1]
    if name == "mul" and isinstance(second, PerRow):
        first, second = second, first
    divides = (name == "div" and isinstance(second, Summed)) or (
        name == "mul" and isinstance(second, Inverse)
    )
    if divides and isinstance(first, PerRow) and not first.is_ratio:
        degree = first.degree - second.degree
        return PerRow(first.dim, first.inner, degree, True)
    if name == "select_n" and isinstance(values[0], Test):
        rows = [v for v in values[1:] if not is_zero(v)]
        ratios = {v for v in rows if isinstance(v, PerRow) and v.is_ratio}
        if values[0].of_zero and len(rows) == len(ratios) == 1:
            return rows[0]
        return CHOSEN
    return ENTERS


def _of_sums(name: str, values: Sequence[Any]) -> Any:
    """Arithmetic of sums over rows with `Fixed`."""
    if name in MOVES:
        return values[0]
    if name in TESTS:
        is_sum = any(isinstance(v, Summed) for v in values)
        return Test(is_sum and any(map(is_zero, values)))
    if name in _LOGIC:
        return Test(all(isinstance(v, Test) and v.of_zero for v in values))
    if name == "is_finite":
        return Test()
    if name in _ADDS:
        return _added(*values)
    if name in ("mul", "div"):
        return _product(name, *values)
    if name in ("max", "min", "clamp"):
        sums = {v.degree for v in values if isinstance(v, Summed)}
        if len(sums) == 1 and all(isinstance(v, Fixed | Summed) for v in values):
            return Summed(sums.pop(), BOUNDED)
        return nonlinear(name)
    if name == "select_n":
        which, *cases = values
        if isinstance(which, Fixed):
            return joined(cases)
        if isinstance(which, Test):
            return _guarded(cases) if which.of_zero else CHOSEN
    return nonlinear(name)


def _guarded(cases: Sequence[Any]) -> Any:
    """A selection between values by whether a sum is 0."""
    reduced = [case for case in cases if isinstance(case, REDUCED)]
    others = [case for case in cases if not isinstance(case, REDUCED)]
    if not reduced:
        return Test(True)
    if len(reduced) > 1 or not isinstance(reduced[0], Ratio | Summed):
        return CHOSEN
    value = reduced[0]
    if isinstance(value, Summed):
        form = BOUNDED if all(map(is_zero, others)) else GUARDED
        return value._replace(form=_weaker(value.form, form))
    return value


def _weaker(first: str, second: str) -> str:
    """The weaker of two forms."""
    return max(first, second, key=FORMS.index)


def _added(first: Any, second: Any) -> Any:
    for one, other in ((first, second), (second, first)):
        if is_zero(one) or (isinstance(other, Summed) and _is_small(one)):
            return other
    kinds = {type(first), type(second)}
    if kinds == {Summed} and first.degree == second.degree:
        form, shifts = _weaker(first.form, second.form), {first.shift, second.shift}
        return _shifted(Summed(first.degree, form), shifts)
    if kinds == {Summed, Fixed}:
        value, number = first, second
        if isinstance(first, Fixed):
            value, number = second, first
        return _shifted(value, {value.shift, number.degree})
    if kinds == {Ratio, Fixed} or (kinds == {Ratio} and first == second):
        value, number = first, second
        if isinstance(first, Fixed):
            value, number = second, first
        return value if number.degree == 0 or kinds == {Ratio} else _OF_NUMBER
    if Test in kinds:
        return CHOSEN
    return Mixed("a sum over rows, a mean over rows or a ratio are added to each other")


def _shifted(value: Summed, shifts: set[int | None]) -> Any:
    """A sum with constants of these degrees added to it."""
    shifts = shifts - {None}
    if len(shifts) > 1:
        return _OF_NUMBER
    return value._replace(shift=shifts.pop() if shifts else None)


def _is_small(value: Any) -> bool:
    """Whether a constant is as small as those that keep divisors from 0."""
    known = value.known if isinstance(value, Fixed) else None
    if known is None or known.dtype.kind not in "fV" or value.degree:
        return False
    return bool(np.all(np.abs(known.astype(np.float64)) <= _EPSILON))


def _product(name: str, first: Any, second: Any) -> Any:
    if name == "mul" and isinstance(first, Fixed | Inverse | Test):
        first, second = second, first
    sign = -1 if name == "div" else 1
    if isinstance(second, Fixed) and not isinstance(first, Test):
        times = sign * second.degree
        if isinstance(first, Inverse):
            times = -times
        value = first._replace(degree=first.degree + times)
        if isinstance(first, Summed) and first.shift is not None:
            return value._replace(shift=first.shift + times)
        return value
    is_sum = isinstance(first, Summed) and first.form == EXACT and first.shift is None
    if name == "div" and isinstance(second, Summed):
        form = second.form if second.shift is None else BOUNDED
        if isinstance(first, Fixed):
            return Inverse(second.degree - first.degree, form)
        if is_sum:
            return Ratio(first.degree - second.degree, form)
    if name == "mul" and isinstance(second, Inverse) and is_sum:
        return Ratio(first.degree - second.degree, second.form)
    if isinstance(second, Test) and isinstance(first, Ratio) and second.of_zero:
        return first
    if isinstance(first, Test) or isinstance(second, Test):
        return CHOSEN
    return nonlinear(name)


def joined(values: Sequence[Any]) -> Any:
    """Joins values of equal shapes: the result may be any of them."""
    value, *others = values
    for other in others:
        value = _join(value, other)
    return value


def same(first: Any, second: Any) -> bool:
    """Whether two values are equal; arrays by their numbers."""
    if isinstance(first, Fixed) and isinstance(second, Fixed):
        one, other = first.known, second.known
        if first.degree != second.degree:
            return False
        if one is None or other is None:
            return one is other
        return bool(np.array_equal(one, other))
    if isinstance(first, Counted) and isinstance(second, Counted):
        return (first.cause, first.place) == (second.cause, second.place)
    return type(first) is type(second) and first == second


def _join(first: Any, second: Any) -> Any:
    if same(first, second):
        return first
    for one, other in ((first, second), (second, first)):
        if isinstance(one, Mixed):
            return one
        if isinstance(one, Counted):
            return one._replace(known=None) if isinstance(other, PLAIN) else counts(one)
        if isinstance(one, Key):
            return Mixed("a key of the loss is joined with other numbers")
    for one, other in ((first, second), (second, first)):
        if is_zero(one) and not isinstance(other, Fixed):
            return other
    kinds = {type(first), type(second)}
    if kinds == {Fixed}:
        degrees = {v.degree for v in (first, second) if not is_zero(v)} or {0}
        return Fixed(None, degrees.pop()) if len(degrees) == 1 else Counted(NUMBER)
    if kinds == {PerRow, Fixed}:
        rows, number = (first, second) if isinstance(first, PerRow) else (second, first)
        if rows.degree or rows.is_ratio:
            return nonlinear("a choice")
        return _OF_NUMBER if number.degree else rows
    if kinds == {PerRow}:
        return elementwise("add", (first, second))
    return _added(first, second)
