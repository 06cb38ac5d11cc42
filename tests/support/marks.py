"""Marks of tests that do not run by default."""

from typing import Any

import pytest


def slow(*values: Any) -> Any:
    """Parameters of a test that only `-m slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)
