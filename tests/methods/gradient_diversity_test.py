"""Gradient diversity: equals brute force; repeated rows change nothing."""

import jax
import numpy as np
import pytest
from support import tiny_models, tiny_stack

from meshpar.errors import MeshparError
from meshpar.methods import gradient_diversity


def brute_force(program, state, batch):
    """The two sums, from one gradient of the whole program's model per row."""
    weights = batch.get("weight", np.ones(len(next(iter(batch.values())))))
    params, grads = tiny_models.host(state.params), []
    gradient = jax.jit(jax.grad(lambda p, b: program.model.evaluation_loss(p, b).loss))
    for row, weight in enumerate(weights / weights.mean()):
        found = gradient(params, {k: x[row : row + 1] for k, x in batch.items()})
        flat = [weight * np.ravel(x) for x in jax.tree.leaves(found)]
        grads.append(np.concatenate(flat).astype(np.float64))
    grads = np.array(grads)
    return np.square(grads).sum(), np.square(grads.sum(axis=0)).sum()


def repeated(batch, times):
    return {k: np.concatenate([x] * times) for k, x in batch.items()}


@pytest.fixture(scope="module")
def stack():
    """A program with weighted rows, its state and its batch."""
    program = tiny_stack.lower("data=2,fsdp=2")
    return program, program.init(), tiny_stack.batch()


def test_equals_brute_force_with_weighted_rows(stack):
    program, state, batch = stack
    found = gradient_diversity.diversity_meter(program)(state, batch)
    squares, square_of_sum = brute_force(program, state, batch)
    assert found.rows == tiny_stack.BATCH
    assert found.squares == pytest.approx(squares, rel=1e-5)
    assert found.square_of_sum == pytest.approx(square_of_sum, rel=1e-5)
    assert found.diversity == pytest.approx(squares / square_of_sum, rel=1e-5)


def test_a_layout_of_the_compiler_equals_brute_force(stack):
    program, batch = tiny_stack.lower("fsdp=2,tensor=2", "jit"), stack[2]
    state = program.init()
    found = gradient_diversity.diversity_meter(program, 4)(state, batch)
    sums = brute_force(program, state, batch)
    assert (found.squares, found.square_of_sum) == pytest.approx(sums, rel=1e-5)


@pytest.mark.slow
def test_a_decoder_that_tensor_splits_equals_brute_force():
    program, batch = tiny_models.lower("fsdp=2,tensor=2"), tiny_models.batch()
    state = program.init()
    found = gradient_diversity.diversity_meter(program, 4)(state, batch)
    sums = brute_force(program, state, batch)
    assert (found.squares, found.square_of_sum) == pytest.approx(sums, rel=1e-4)


def test_repeated_rows_do_not_raise_the_bound(stack):
    program, state, batch = stack
    half = {k: x[:8] for k, x in batch.items()}
    squares, square_of_sum = brute_force(program, state, half)
    once = gradient_diversity.Diversity(8, squares, square_of_sum)
    twice = gradient_diversity.diversity_meter(program, 16)(state, repeated(half, 2))
    assert twice.batch_bound == pytest.approx(once.batch_bound, rel=1e-5)


def test_the_estimate_from_samples_is_that_of_the_data():
    rng = np.random.default_rng(0)
    data = rng.normal(size=(4096, 30)) + 0.5  # The bound is (30 + 7.5) / 7.5 = 5.
    sums = lambda g: (np.square(g).sum(), np.square(g.sum(0)).sum())  # noqa: E731
    whole = gradient_diversity.Diversity(len(data), *sums(data)).batch_bound
    assert whole == pytest.approx(5, rel=0.05)
    samples = [
        gradient_diversity.Diversity(16, *sums(rows))
        for rows in data.reshape(256, 16, 30)
    ]
    estimates = [sample.estimated_bound for sample in samples]
    assert np.median(estimates) == pytest.approx(whole, rel=0.05)
    assert np.median([s.batch_bound for s in samples]) < 0.85 * whole


def test_gradients_that_are_equal_or_at_right_angles():
    equal, square = (
        gradient_diversity.Diversity(4, 4.0, 16.0),
        gradient_diversity.Diversity(4, 4.0, 4.0),
    )
    assert (equal.batch_bound, equal.estimated_bound) == (1, 1)
    assert square.batch_bound == 4 and square.estimated_bound == float("inf")


def test_rows_that_do_not_divide_the_batch(stack):
    with pytest.raises(MeshparError, match="rows_at_once=5 for batches of 16 rows"):
        gradient_diversity.diversity_meter(stack[0], 5)
