"""The examples can be imported by their names, as by a script beside them."""

import pathlib
import sys

import pytest

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))


@pytest.fixture(autouse=True)
def drawn_once():
    """Every program draws its own weights here."""
