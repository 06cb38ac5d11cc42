"""Every figure rejects the mistakes that are planted in the methods that it shows."""

import collections

import pytest
from support import planted_papers

from experiments.gallery import catalog

MISTAKES = planted_papers.all_mistakes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", MISTAKES, ids=lambda mistake: f"{mistake.figure}: {mistake.words}"
)
def test_a_planted_mistake_is_rejected(mistake, monkeypatch):
    mistake.plant(monkeypatch)
    failed = mistake.failed()
    assert any(text.startswith(mistake.rejected) for text in failed), failed


@pytest.mark.slow
@pytest.mark.parametrize("figure", sorted({m.figure for m in MISTAKES if m.claims}))
def test_without_a_mistake_the_same_claims_hold(figure):
    for claims in {m.claims for m in MISTAKES if m.figure == figure and m.claims}:
        assert [claim.text for claim in claims() if not claim.holds] == []


def test_every_figure_has_two_mistakes_at_least():
    counts = collections.Counter(mistake.figure for mistake in MISTAKES)
    assert {name: counts[name] for name in catalog.PAPERS if counts[name] < 2} == {}
    assert len(MISTAKES) >= 60
    assert len({(m.figure, m.words) for m in MISTAKES}) == len(MISTAKES)


def test_the_page_lists_the_planted_mistakes():
    command = "PYTHONPATH=.:tests python -m support.planted_papers"
    assert planted_papers.PAGE.read_text() == planted_papers.page(), command
