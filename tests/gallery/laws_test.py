"""Figures of the laws of steps and messages: accepted, and able to fail."""

import pytest

from experiments.gallery import (
    communication_patterns,
    large_batches,
    megatron_collectives,
    messages,
    model_sizes,
    roofline,
    synchronous_sgd,
    time_to_accuracy,
)
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


def test_sizes_of_models():
    assert failed(model_sizes.PAPER.run(QUICK).claims) == []


def test_passes_at_the_edge_of_a_grid_or_that_fall_are_not_accepted():
    tuned = time_to_accuracy.passes.Tuned
    found = {32: tuned(1.5, 1, True), 128: tuned(4.5, 1, True)}
    claims = time_to_accuracy.passes_claims
    assert failed(claims(found)) == []
    (text,) = failed(claims({**found, 128: tuned(4.5, 1, False)}))
    assert text.startswith("the best rate of each batch size")
    assert len(failed(claims({**found, 128: tuned(1.0, 1, True)}))) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        synchronous_sgd,
        communication_patterns,
        megatron_collectives,
        roofline,
        time_to_accuracy,
        large_batches,
    ],
)
def test_quick_versions_are_accepted(module):
    assert failed(module.PAPER.run(QUICK).claims) == []
