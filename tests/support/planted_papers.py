"""Mistakes that are planted in the library, and the figures that have to reject them.

A mistake changes a method of `meshpar` (or a model beside the gallery), never a number
of a figure. Its figure then computes its claims, and at least one of them must fail.

Write the page of all mistakes: `PYTHONPATH=.:tests python -m support.planted_papers`.
"""

import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
from support.figures import failed, missed

from experiments.gallery import catalog
from experiments.gallery.paper import Claim

PAGE = pathlib.Path(__file__).parents[2] / "docs/papers/mistakes.md"
_HEAD = """\
# Mistakes that the figures reject

A figure is worth as much as the mistakes that it rejects. Each line is a mistake that a
test plants in the library; with it the figure's program must say `NO` to the claim
beside it. The tests are in `tests/gallery/planted_papers_test.py`.
"""


class Mistake(NamedTuple):
    """A mistake in a method, and the claim that rejects it.

    Attributes:
      figure: name of the paper.
      words: the mistake.
      plant: changes the library, and undoes it with the test.
      rejected: beginning of the claim that must fail.
      claims: computes the claims; by default the figure's quick version.
    """

    figure: str
    words: str
    plant: Callable[[pytest.MonkeyPatch], None]
    rejected: str
    claims: Callable[[], Iterable[Claim]] | None = None

    def failed(self) -> list[str]:
        """The claims that do not hold."""
        return failed(self.claims()) if self.claims else missed(self.figure)


def replace(
    patch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Callable[[Any], Any]
) -> None:
    """Replaces a function of a module or class, wherever modules have imported it.

    Args:
      patch: undoes it.
      owner: module or class.
      name: of the function.
      wrong: the right function -> the wrong one.
    """
    right = getattr(owner, name)
    made = wrong(right)
    patch.setattr(owner, name, made)
    for module in list(sys.modules.values()):
        if not getattr(module, "__name__", "").startswith(("meshpar", "experiments")):
            continue
        for key, value in list(vars(module).items()):
            if value is right:
                patch.setattr(module, key, made)


def planted(owner: Any, name: str, wrong: Callable[[Any], Any]) -> Callable:
    """A `plant` that replaces one function."""
    return lambda patch: replace(patch, owner, name, wrong)


def all_mistakes() -> list[Mistake]:
    """The mistakes in the order of the gallery."""
    from support import (
        planted_in_islands,
        planted_in_laws,
        planted_in_methods,
        planted_in_programs,
        planted_in_replicas,
        planted_in_stages,
    )

    modules = (
        planted_in_islands,
        planted_in_laws,
        planted_in_methods,
        planted_in_programs,
        planted_in_replicas,
        planted_in_stages,
    )
    found = [mistake for module in modules for mistake in module.MISTAKES]
    order = list(catalog.PAPERS)
    return sorted(found, key=lambda mistake: order.index(mistake.figure))


def page() -> str:
    """The page of all mistakes."""
    lines = ["| figure | mistake | the claim that fails |", "| --- | --- | --- |"]
    for mistake in all_mistakes():
        cells = mistake.figure, mistake.words, f"{mistake.rejected}"
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    count = f"\n{len(lines) - 2} mistakes in {len(catalog.PAPERS)} figures:\n\n"
    return _HEAD + count + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
