"""Marks of tests that do not run by default."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Parameters of a test that only `-m slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


def first(number: int, cases: Iterable[Any]) -> list[Any]:
    """Cases of a test, of which the first ones alone run by default.

    Args:
      number: how many run by default.
      cases: values of one parameter, tuples of values, or `slow(...)`.
    """
    cases = list(cases)
    return cases[:number] + [_slow_case(case) for case in cases[number:]]


def _slow_case(case: Any) -> Any:
    if hasattr(case, "marks"):
        return case
    return slow(*case) if isinstance(case, tuple) else slow(case)
