"""Closed forms of patterns are the time of messages that are sent one by one."""

import pytest

from experiments.gallery import messages
from meshpar.errors import MeshparError
from meshpar.methods import pattern_costs as costs


@pytest.mark.parametrize("topology", costs.TOPOLOGIES)
@pytest.mark.parametrize("pattern", costs.PATTERNS)
def test_a_closed_form_is_the_time_of_its_messages(pattern, topology):
    sizes = (2, 8) if topology in (costs.TREE, costs.FULL) else (2, 5, 8)
    for n in sizes:
        found, closed = (
            messages.simulate(pattern, topology, n),
            costs.cost(pattern, topology, n),
        )
        assert found == pytest.approx((closed.messages, closed.payloads)), n
    assert costs.cost(pattern, topology, 1) == costs.Cost(0, 0)


def test_seconds_and_the_fastest_topology():
    one = costs.Cost(3, 1.5)
    assert one.seconds(1e6, latency=1e-3, bandwidth=1e9) == pytest.approx(4.5e-3)
    assert costs.fastest("all_to_all", 64, 1e6, 1e-6, 50e9) == costs.FULL
    assert costs.fastest("broadcast", 64, 1e6, 1e-6, 50e9) == costs.TREE
    assert costs.crossing_bytes(2, 1e-6, 50e9) == 0  # A ring of two is as good.


@pytest.mark.parametrize(
    "words, message",
    [
        (("all_reduces", "ring", 8), "did you mean 'all_reduce'"),
        (("all_reduce", "rings", 8), "did you mean 'ring'"),
        (("all_reduce", "tree", 6), "a tree of n=6 devices: use a power of two"),
        (("all_reduce", "ring", 0), "a ring of n=0 devices: use 1 or more"),
    ],
)
def test_what_has_no_cost_is_refused(words, message):
    with pytest.raises(MeshparError, match=message):
        costs.cost(*words)
