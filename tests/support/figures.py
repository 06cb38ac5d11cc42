"""Figures of the gallery in tests: their quick versions, and claims that fail."""

from collections.abc import Iterable

import matplotlib.figure

from experiments.gallery import catalog
from experiments.gallery.paper import Claim, Result, Setting


def run(name: str) -> Result:
    """The quick version of a figure."""
    setting = Setting(quick=True, seeds=(0,), progress=lambda text, share: None)
    return catalog.get(name).run(setting)


def failed(claims: Iterable[Claim]) -> list[str]:
    """The texts of the claims that do not hold."""
    return [claim.text for claim in claims if not claim.holds]


def missed(name: str) -> list[str]:
    """The claims of a quick version that do not hold."""
    return failed(run(name).claims)


def check(name: str) -> None:
    """Asserts that a quick version is accepted, and that its table and picture fit."""
    result = run(name)
    assert failed(result.claims) == []
    result.draw(matplotlib.figure.Figure())
    assert all(len(row) == len(result.columns) for row in result.rows)
