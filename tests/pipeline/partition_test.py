"""Partitions of layers over stages."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from support.marks import first
from support.tiny_models import BATCH, LENGTH, batch, model, plain_model

from meshpar.errors import LayoutError
from meshpar.pipeline import partition


@pytest.mark.parametrize(
    "stages, chunks, depth", first(2, [(2, 2, 8), (3, 1, 7), (2, 3, 11)])
)
def test_every_layer_is_stored_once_and_in_order(stages, chunks, depth):
    split = partition.make_partition(depth, stages, chunks)
    assert max(split.sizes) - min(split.sizes) <= 1
    stored = split.order.reshape(stages, chunks, split.rows)
    layers = []
    for chunk, stage in itertools.product(range(chunks), range(stages)):
        layers += [i for i in stored[stage, chunk] if i >= 0]
    assert layers == list(range(depth))
    x = jnp.arange(3.0 * depth).reshape(depth, 3) + 1
    assert (split.restore(split.store(x)) == x).all()
    assert (split.store(x)[split.order < 0] == 0).all()
    assert split.moves


def test_one_even_chunk_per_stage_keeps_the_model_order():
    assert not partition.make_partition(8, 4).moves


def brute_force(costs, positions, first, last):
    best = np.inf
    for cuts in itertools.combinations(range(1, len(costs)), positions - 1):
        runs = np.split(np.array(costs), cuts)
        sums = [run.sum() for run in runs]
        sums[0] += first
        sums[-1] += last
        best = min(best, max(sums))
    return best


@pytest.mark.parametrize("seed", range(5))
def test_balanced_sizes_equal_the_best_of_all_cuts(seed):
    random = np.random.default_rng(seed)
    costs, first, last = random.uniform(1, 5, 9).tolist(), 2.0, 4.0
    sizes = partition.balanced_sizes(costs, 4, first, last)
    assert sum(sizes) == 9 and min(sizes) >= 1
    sums = [run.sum() for run in np.split(np.array(costs), np.cumsum(sizes)[:-1])]
    sums[0] += first
    sums[-1] += last
    assert max(sums) == pytest.approx(brute_force(costs, 4, first, last))


def test_measured_costs_are_the_matmuls_of_the_model():
    big_head = model(depth=8, vocab=2048)
    costs = partition.measured_costs(big_head, batch())
    tokens, width, mlp = BATCH * LENGTH, 32, 64
    attention = 4 * width * width + 2 * LENGTH * width
    assert costs.layer == pytest.approx(
        2 * tokens * (attention + 3 * width * mlp), rel=0.2
    )
    assert costs.head == pytest.approx(2 * tokens * width * 2048, rel=0.2)
    sizes = partition.balanced_sizes([costs.layer] * 8, 2, costs.embed, costs.head)
    assert sizes[0] > sizes[1]  # The head costs as much as several layers.
    with pytest.raises(LayoutError, match="no layered form"):
        partition.measured_costs(plain_model(), batch())


@pytest.mark.parametrize(
    "sizes, words",
    [((3, 4), "8 in all"), ((8, 0), "at least 1"), ((2, 2, 4), "give 2 numbers")],
)
def test_impossible_sizes_are_refused(sizes, words):
    with pytest.raises(LayoutError, match=words):
        partition.make_partition(8, 2, 1, sizes)
    with pytest.raises(LayoutError, match="makes 4 chunks of 3 layers"):
        partition.make_partition(3, 2, 2)
