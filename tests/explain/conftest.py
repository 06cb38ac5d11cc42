"""Programs are proved equal from their first draws on."""

import pytest


@pytest.fixture(autouse=True)
def drawn_once():
    """Every program draws its own weights here."""
