"""Figures of the laws of steps and messages: accepted, and able to fail."""

import pytest
from support.figures import failed

from experiments.gallery import (
    communication_patterns,
    large_batches,
    messages,
    time_to_accuracy,
)


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


def test_passes_at_the_edge_of_a_grid_or_that_fall_are_not_accepted():
    tuned = time_to_accuracy.passes.Tuned
    found = {32: tuned(1.5, 1, True), 128: tuned(4.5, 1, True)}
    claims = time_to_accuracy.passes_claims
    assert failed(claims(found)) == []
    (text,) = failed(claims({**found, 128: tuned(4.5, 1, False)}))
    assert text.startswith("the best rate of each batch size")
    assert len(failed(claims({**found, 128: tuned(1.0, 1, True)}))) == 2


def test_rules_that_hold_too_much_or_too_little_are_not_accepted():
    claims, curve = large_batches.rule_claims, {1 / 16: 0.45, 0.5: 0.1}
    small = {128: {"same rate": 1.3, "root": 0.8, "linear": 0.46}}
    large = {"same rate": 0.6, "root": 2.0, "linear": 2.5, "linear, warm-up": 2.0}
    large |= {"SGD, tuned": 0.6, "LARS": 0.3, "LAMB": 0.3}
    assert failed(claims(curve, {512: large}, small, True)) == []
    (text,) = failed(claims(curve, {512: large | {"LAMB": 0.7}}, small, True))
    assert text.startswith("LARS and LAMB, tuned, lose less")
    (text,) = failed(claims(curve, {512: large | {"linear": 0.1}}, small, True))
    assert text.startswith("from the best rate no rule")
    root = {128: small[128] | {"root": 0.46}}
    (text,) = failed(claims(curve, {512: large}, root, False)[1:])
    assert text.startswith("from a small rate the linear rule")
