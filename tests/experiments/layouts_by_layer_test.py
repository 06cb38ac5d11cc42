"""The bound on what layouts of their own for each layer could gain."""

import itertools

import numpy as np
import pytest

from experiments.benchmarks.layouts_by_layer import Cost, least_seconds

LAYERS = 6
COSTS = Cost(9.0, 1.0), Cost(6.0, 1.5), Cost(5.0, 3.0), Cost(3.0, 4.0)


@pytest.mark.parametrize("memory", [2.9, 3.0, 4.5, 6.5, 9.0])
def test_no_choice_by_layer_is_faster_and_some_reach_the_bound(memory):
    choices = itertools.combinations_with_replacement(COSTS, LAYERS)
    means = [Cost(*np.mean(choice, axis=0)) for choice in choices]
    fitting = [c.seconds for c in means if c.memory <= memory + 1e-9]
    best = min(fitting, default=np.inf)
    assert best == pytest.approx(least_seconds(COSTS, memory))
