"""Results are made once, and so are errors."""

import pytest

from meshpar.errors import LayoutError
from meshpar.once import Once


def test_results_and_errors_are_made_once():
    made, once = [], Once()

    def make():
        made.append(len(made))
        if len(made) > 1:
            raise LayoutError("no such mesh")
        return "a mesh"

    assert [once.of("fits", make) for _ in range(3)] == ["a mesh"] * 3
    for _ in range(3):
        with pytest.raises(LayoutError, match="no such mesh"):
            once.of("does not", make)
    assert made == [0, 1]


def test_the_last_used_are_kept():
    made, once = [], Once(2)
    for key in "abacab":
        once.of(key, lambda key=key: made.append(key))
    assert made == ["a", "b", "c", "b"]
