"""Vector clocks against reachability in drawn graphs of events."""

import itertools

import numpy as np
import pytest

from meshpar.errors import MeshparError
from meshpar.methods.vector_clocks import VectorClock

PROCESSES = "abcd"


def events(seed, count=40):
    """(clocks of events, the events that each one follows at once)."""
    draws, clocks, follows = np.random.default_rng(seed), [], []
    last, inbox = dict.fromkeys(PROCESSES), {p: [] for p in PROCESSES}
    for number in range(count):
        process = PROCESSES[draws.integers(4)]
        before = last[process]
        own = VectorClock() if before is None else clocks[before]
        edges = [] if before is None else [before]
        if inbox[process] and draws.random() < 0.7:
            sender = inbox[process].pop(int(draws.integers(len(inbox[process]))))
            own = own.received(process, clocks[sender])
            edges.append(sender)
        else:
            own = own.tick(process)
        clocks.append(own)
        follows.append(edges)
        last[process] = number
        if draws.random() < 0.5:
            to = PROCESSES[draws.integers(4)]
            if to != process:
                inbox[to].append(number)
    return clocks, follows


def ancestors(follows, event):
    found, open_ones = set(), list(follows[event])
    while open_ones:
        one = open_ones.pop()
        if one not in found:
            found.add(one)
            open_ones += follows[one]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_clocks_are_ordered_as_the_events_are_reached(seed):
    clocks, follows = events(seed)
    before = [ancestors(follows, event) for event in range(len(clocks))]
    kinds = {True: 0, False: 0}
    for one, other in itertools.permutations(range(len(clocks)), 2):
        assert (clocks[one] < clocks[other]) == (one in before[other])
        apart = one not in before[other] and other not in before[one]
        assert clocks[one].concurrent(clocks[other]) == apart
        kinds[apart] += 1
    assert min(kinds.values()) > 100
    for event, clock in enumerate(clocks):
        assert sum(clock.counts.values()) == 1 + len(before[event])


def test_clocks_that_count_nothing_are_equal():
    assert VectorClock({"a": 0}) == VectorClock() and VectorClock() <= VectorClock()
    assert not VectorClock() < VectorClock()
    with pytest.raises(MeshparError, match="a: -1 events: use whole numbers"):
        VectorClock({"a": -1})
