"""Galvatron's decision trees have the strategies that trying all combinations has."""

import itertools
import math

import pytest

from meshpar.errors import MeshparError
from meshpar.methods.decision_tree import KINDS, strategies


def by_trying(devices, prune):
    """All orders of all sets of kinds, with all degrees that fill the devices."""
    degrees = [n for n in range(1, devices + 1) if devices % n == 0]
    found = set()
    for stages, count in itertools.product(degrees, range(len(KINDS) + 1)):
        for order in itertools.permutations(KINDS, count):
            if prune and {"data", "fsdp"} <= set(order):
                continue
            for sizes in itertools.product(degrees[1:], repeat=count):
                if stages * math.prod(sizes) == devices:
                    found.add((stages, tuple(zip(order, sizes, strict=True))))
    return found


@pytest.mark.parametrize("prune", [False, True])
@pytest.mark.parametrize("devices", [1, 2, 4, 8, 16])
def test_trees_have_every_strategy_once(devices, prune):
    found = strategies(devices, prune)
    assert len(set(found)) == len(found)
    assert {(s.stages, s.splits) for s in found} == by_trying(devices, prune)
    assert all(s.layout.num_devices == devices for s in found)


def test_eight_devices_have_the_papers_counts():
    assert len(strategies(8, prune=False)) == 34 and len(strategies(8)) == 22


def test_other_numbers_of_devices_are_refused():
    with pytest.raises(MeshparError, match="devices=6: use a power of two"):
        strategies(6)
