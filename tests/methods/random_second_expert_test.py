"""GShard's gating equals a loop over its algorithm 1."""

import jax
import numpy as np
import pytest
from support.marks import slow

from meshpar.errors import MeshparError
from meshpar.methods.random_second_expert import gating

T, E = 64, 4


def by_loop(logits, capacity, draws):
    """Algorithm 1 of the paper, token by token; draws are its random numbers."""
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    combine, used = np.zeros((T, E, capacity)), [0] * E
    firsts = [0] * E
    order = np.argsort(-shares, axis=1, kind="stable")
    for t in range(T):
        one, two = order[t, :2]
        g1 = shares[t, one] / (shares[t, one] + shares[t, two])
        if used[one] < capacity:
            combine[t, one, used[one]] = g1
            used[one] += 1
        firsts[one] += 1
    for t in range(T):
        one, two = order[t, :2]
        g2 = shares[t, two] / (shares[t, one] + shares[t, two])
        if 2 * g2 > draws[t] and used[two] < capacity:
            combine[t, two, used[two]] = g2
            used[two] += 1
    balance = np.mean(np.array(firsts) / T * shares.mean(axis=0))
    return combine, balance


@pytest.mark.parametrize("capacity", [slow(3), slow(16), 2 * T])
def test_gates_are_those_of_a_loop(capacity):
    logits = np.random.default_rng(0).normal(size=(T, E)).astype(np.float32)
    key = jax.random.key(1)
    for chosen, draws in ((key, jax.random.uniform(key, (T,))), (None, np.zeros(T))):
        found = gating(logits, capacity, chosen)
        combine, balance = by_loop(np.float64(logits), capacity, np.asarray(draws))
        np.testing.assert_allclose(found.combine, combine, atol=1e-6)
        assert float(found.balance) == pytest.approx(balance, rel=1e-6)
        assert np.array_equal(found.dispatch, combine > 0)
        # A slot has one token at most.
        assert found.dispatch.sum(axis=0).max() <= 1


def test_second_experts_come_with_twice_their_gate():
    logits = np.array([[1.0, 0.0, -9.0, -9.0]] * T, np.float32)
    second = 1 / (1 + np.e)
    draw = jax.jit(lambda key: gating(logits, 2 * T, key).dispatch[:, 1].sum())
    counts = [int(draw(jax.random.key(seed))) for seed in range(200)]
    share = np.mean(counts) / T
    assert share == pytest.approx(2 * second, abs=4 * (0.25 / T / 200) ** 0.5)


@pytest.mark.parametrize("shape, capacity", [((3, 1), 2), ((3, 4), 0)])
def test_too_few_experts_or_slots_are_refused(shape, capacity):
    with pytest.raises(MeshparError, match="at least 2 experts and 1 slot"):
        gating(np.zeros(shape, np.float32), capacity)
