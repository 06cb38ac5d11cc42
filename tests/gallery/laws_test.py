"""Figures of the laws of steps and messages: accepted, and able to fail."""

import pytest

from experiments.gallery import communication_patterns, messages, synchronous_sgd
from experiments.gallery.paper import Setting

QUICK = Setting(quick=True, seeds=(0,), progress=lambda text, share: None)


def failed(claims):
    return [claim.text for claim in claims if not claim.holds]


def test_messages_and_what_is_no_message(monkeypatch):
    assert failed(communication_patterns.simulation_claims((4,))) == []
    right = messages.links
    monkeypatch.setattr(messages, "links", lambda t, n: right("ring", n))
    with pytest.raises(ValueError, match="there is no such link"):
        messages.simulate("broadcast", "star", 8)
    monkeypatch.setattr(messages, "links", right)
    two = lambda *_: iter([(False, [(0, 1, [0]), (0, 2, [0])])])  # noqa: E731
    monkeypatch.setattr(messages, "rounds_of", two)
    with pytest.raises(ValueError, match="two messages of one device"):
        messages.simulate("broadcast", "full", 4)
    monkeypatch.setattr(messages, "rounds_of", lambda *_: iter([]))
    with pytest.raises(ValueError, match="ends with other numbers"):
        messages.simulate("broadcast", "full", 4)


@pytest.mark.slow
@pytest.mark.parametrize("module", [synchronous_sgd, communication_patterns])
def test_quick_versions_are_accepted(module):
    assert failed(module.PAPER.run(QUICK).claims) == []
