"""Arithmetic of values that depend on the rows of a batch (`rows.values`)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshpar.rows.values import (
    COMBINED,
    ENTERS,
    REDUCED,
    Fixed,
    Inverse,
    Mixed,
    Ratio,
    Rows,
    Summed,
    Test,
    degree_of,
    is_zero,
    nonlinear,
)

MOVES = frozenset(
    ("neg", "convert_element_type", "copy", "copy_p", "sharding_constraint")
    + ("reduce_precision", "pvary", "pcast", "optimization_barrier")
    + ("stop_gradient", "real")
)
"""Primitives of one operand that keep sums sums."""

_TESTS = frozenset(
    ("eq", "ne", "lt", "le", "gt", "ge", "is_finite", "and", "or", "not", "xor")
)
_ADDS = frozenset(("add", "sub", "add_any"))
_FORMS = ("exact", "shifted", "guarded")


def elementwise(name: str, values: Sequence[Any], prime: int) -> Any:
    """The value of an elementwise primitive, or of one that moves numbers only.

    Args:
      name: of the primitive.
      values: of its operands, not all of them `Fixed`.
      prime: the number of rows.
    """
    if mixed := next((v for v in values if isinstance(v, Mixed)), None):
        return mixed
    has_rows = any(isinstance(v, Rows) for v in values)
    if not any(isinstance(v, REDUCED) for v in values):
        return _of_rows(name, values, prime)
    return _scaled(name, values) if has_rows else _of_sums(name, values, prime)


def _of_rows(name: str, values: Sequence[Any], prime: int) -> Any:
    """Arithmetic of `Rows` with `Fixed`."""
    rows = [v for v in values if isinstance(v, Rows)]
    if len({(v.dim, v.inner) for v in rows}) > 1:
        return COMBINED
    first, *_ = rows
    plain = Rows(first.dim, first.inner)
    if name in MOVES:
        return first._replace(columns=())
    if name in ("mul", "div"):
        signs = (1, -1 if name == "div" else 1)
        degree = sum(
            sign * (v.degree if isinstance(v, Rows) else degree_of(v, prime))
            for sign, v in zip(signs, values, strict=True)
        )
        ratios = [isinstance(v, Rows) and v.is_ratio for v in values]
        if sum(ratios) > 1 or (name == "div" and ratios[1]):
            return nonlinear(name)
        return plain._replace(degree=degree, is_ratio=any(ratios))
    factors = {(v.degree, v.is_ratio) for v in rows}
    if factors == {(0, False)}:
        return plain
    linear = name in _ADDS or (name == "select_n" and isinstance(values[0], Fixed))
    others = [v for v in values if isinstance(v, Fixed)]
    if name == "select_n":
        others, factors = _cases(values)
        linear = True
    if not linear or len(factors) > 1 or not all(map(is_zero, others)):
        return nonlinear(name)
    ((degree, is_ratio),) = factors
    return plain._replace(degree=degree, is_ratio=is_ratio)


def _cases(values: Sequence[Any]) -> tuple[list[Any], set[tuple[int, bool]]]:
    """The fixed cases of a selection, and the factors of those that are rows."""
    which, *cases = values
    factors = {(v.degree, v.is_ratio) for v in cases if isinstance(v, Rows)}
    if isinstance(which, Rows) and (which.degree or which.is_ratio):
        factors |= {(0, False), (1, True)}  # A choice by such a number is not linear.
    return [v for v in cases if isinstance(v, Fixed)], factors


def _scaled(name: str, values: Sequence[Any]) -> Any:
    """Rows divided by a sum over rows; anything else mixes rows."""
    first, second = values[0], values[-1]
    if name == "mul" and isinstance(second, Rows):
        first, second = second, first
    divides = (name == "div" and isinstance(second, Summed)) or (
        name == "mul" and isinstance(second, Inverse)
    )
    if divides and isinstance(first, Rows) and not first.is_ratio:
        degree = first.degree - second.degree
        return Rows(first.dim, first.inner, degree, True)
    if name == "select_n" and isinstance(values[0], Test):
        rows = [v for v in values[1:] if not is_zero(v)]
        ratios = {v for v in rows if isinstance(v, Rows) and v.is_ratio}
        if len(rows) == len(ratios) == 1:
            return rows[0]
    return ENTERS


def _of_sums(name: str, values: Sequence[Any], prime: int) -> Any:
    """Arithmetic of sums over rows with `Fixed`."""
    if name in MOVES:
        return values[0]
    if name in _TESTS:
        known = (Fixed, Summed, Ratio, Test)
        return Test() if all(isinstance(v, known) for v in values) else nonlinear(name)
    if name in _ADDS:
        return _added(*values)
    if name in ("mul", "div"):
        return _product(name, *values, prime=prime)
    if name in ("max", "min", "clamp"):
        sums = {v.degree for v in values if isinstance(v, Summed)}
        if len(sums) == 1 and all(isinstance(v, Fixed | Summed) for v in values):
            return Summed(sums.pop(), "guarded")
        return nonlinear(name)
    if name == "select_n":
        which, *cases = values
        if isinstance(which, Fixed):
            return joined(cases)
        if isinstance(which, Test):
            return _guarded(cases)
    return nonlinear(name)


def _guarded(cases: Sequence[Any]) -> Any:
    """One of several values, chosen by a comparison of sums."""
    value = joined([case for case in cases if not is_zero(case)] or cases)
    if isinstance(value, Summed) and value.form != "exact":
        return value._replace(form="guarded")
    return Test() if isinstance(value, Fixed) else value


def _added(first: Any, second: Any) -> Any:
    for one, other in ((first, second), (second, first)):
        if is_zero(one):
            return other
    kinds = {type(first), type(second)}
    if kinds == {Summed} and first.degree == second.degree:
        return Summed(first.degree, max(first.form, second.form, key=_FORMS.index))
    if kinds == {Summed, Fixed}:
        value = first if isinstance(first, Summed) else second
        return value._replace(form=max(value.form, "shifted", key=_FORMS.index))
    if kinds == {Ratio, Fixed} or (kinds == {Ratio} and first == second):
        return first if isinstance(first, Ratio) else second
    return Mixed("a sum over rows, a mean over rows or a ratio are added to each other")


def _product(name: str, first: Any, second: Any, *, prime: int) -> Any:
    if name == "mul" and isinstance(first, Fixed | Inverse | Test):
        first, second = second, first
    sign = -1 if name == "div" else 1
    if isinstance(second, Fixed) and not isinstance(first, Test):
        return first._replace(degree=first.degree + sign * degree_of(second, prime))
    if name == "div" and isinstance(second, Summed):
        if isinstance(first, Fixed):
            return Inverse(second.degree - degree_of(first, prime))
        if isinstance(first, Summed) and first.form == "exact":
            return Ratio(first.degree - second.degree)
    if name == "mul" and isinstance(second, Inverse):
        if isinstance(first, Summed) and first.form == "exact":
            return Ratio(first.degree - second.degree)
    if name == "mul" and isinstance(second, Test) and isinstance(first, Ratio | Summed):
        return first
    return nonlinear(name)


def counted(values: Sequence[Any], prime: int) -> Any:
    """The sum of two numbers: a counter of rows if one is the number of rows."""
    degree = max(degree_of(v, prime) for v in values)
    return Summed(degree - 1, "shifted") if degree > 0 else Fixed()


def joined(values: Sequence[Any]) -> Any:
    """The value of a number that is one of several, of equal shapes."""
    value, *others = values
    for other in others:
        value = _join(value, other)
    return value


def same(first: Any, second: Any) -> bool:
    """Whether two values are equal; arrays by their numbers."""
    if isinstance(first, Fixed) and isinstance(second, Fixed):
        one, other = first.known, second.known
        if one is None or other is None:
            return one is other
        return bool(np.array_equal(one, other))
    return type(first) is type(second) and first == second


def _join(first: Any, second: Any) -> Any:
    if same(first, second):
        return first
    for one, other in ((first, second), (second, first)):
        if isinstance(one, Mixed) or (is_zero(one) and not isinstance(other, Fixed)):
            return one if isinstance(one, Mixed) else other
    kinds = {type(first), type(second)}
    if kinds == {Fixed}:
        return Fixed()
    if kinds == {Rows, Fixed}:
        rows = first if isinstance(first, Rows) else second
        return nonlinear("a choice") if rows.degree or rows.is_ratio else rows
    if kinds == {Rows}:
        return elementwise("add", (first, second), 0)
    return _added(first, second)
