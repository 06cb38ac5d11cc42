"""DBPG against other solvers, under delays, filters and the death of a server."""

import dataclasses

import numpy as np
import pytest
import scipy.sparse as sp

from experiments.convex import reference
from meshpar.errors import MeshparError
from meshpar.methods.dbpg import proximal
from meshpar.methods.dbpg.training import Training
from meshpar.methods.dbpg.worker import Settings

L1 = 2.0


@pytest.fixture(scope="module")
def problem():
    """Rows of a few popular and many rare features, as in text, and their labels."""
    rng = np.random.default_rng(0)
    popularity = (np.arange(400) + 5.0) ** -0.9
    popularity /= popularity.sum()
    columns = rng.choice(400, size=(600, 12), p=popularity)
    starts = np.arange(0, columns.size + 1, 12)
    rows = sp.csr_array((np.ones(columns.size), columns.ravel(), starts), (600, 400))
    rows.sum_duplicates()
    truth = np.where(rng.random(400) < 0.1, rng.normal(size=400) * 2, 0)
    chances = 1 / (1 + np.exp(-(rows @ truth)))
    return rows, np.where(rng.random(600) < chances, 1.0, -1.0)


@pytest.fixture(scope="module")
def minimum(problem):
    return reference.minimum(reference.SCIPY, *problem, L1, 1e-13)


def train(problem, num_workers=2, num_servers=2, say=lambda done: None, **settings):
    defaults = dict(l1=L1, passes=20, blocks=6, delay=0)
    settings = Settings(**(defaults | settings))
    return Training(*problem, settings, num_workers, num_servers).run(say)


@pytest.mark.slow
def test_the_reference_solvers_agree(problem, minimum):
    pytest.importorskip("sklearn", reason="liblinear comes with scikit-learn")
    found = reference.minimum(reference.LIBLINEAR, *problem, L1, 1e-8)
    assert found == pytest.approx(minimum, rel=1e-6)


@pytest.mark.parametrize("delay", [0, 3])
def test_delayed_proximal_gradients_reach_the_minimum(problem, minimum, delay):
    result = train(problem, delay=delay)
    last = result.passes[-1]
    assert minimum * (1 - 1e-6) < last.objective < minimum * (1 + 5e-4)
    assert last.nonzeros == np.count_nonzero(result.weights) < 120
    assert [done.pushed for done in result.passes] == [1.0] * 20
    margins = problem[1] * (problem[0] @ result.weights)
    assert proximal.objective(margins, result.weights, L1) == last.objective


LOSSLESS = dict(significant=0.0, key_caching=True, compression="zlib")


def test_lossless_filters_change_no_bit_and_account_for_all_bytes(problem):
    plain = train(problem, passes=4)
    filtered = train(problem, passes=4, **LOSSLESS)
    np.testing.assert_array_equal(plain.weights, filtered.weights)
    saved = {(row.direction, row.name): row.saved for row in filtered.filters}
    assert filtered.sent + sum(saved.values()) == plain.sent
    assert saved["pushes", "key caching"] > 0.1 * plain.sent
    assert saved["answers", "significantly modified"] > 0


def test_the_kkt_filter_leaves_out_most_keys_and_reaches_the_minimum(problem, minimum):
    result = train(problem, kkt_filter=True, **LOSSLESS)
    assert result.passes[-1].objective < minimum * (1 + 1e-3)
    assert np.mean([done.pushed for done in result.passes[5:10]]) < 0.35
    assert result.passes[0].pushed == result.passes[10].pushed == 1.0
    plain = train(problem)
    saved = sum(row.saved for row in result.filters)
    assert result.sent + saved == plain.sent
    assert result.sent < 0.5 * plain.sent


@pytest.mark.parametrize(
    "settings",
    [dict(skip=0.2), dict(compression="bf16"), dict(significant=1e-3)],
    ids=str,
)
def test_lossy_filters_reach_the_minimum_within_a_thousandth(
    problem, minimum, settings
):
    result = train(problem, **settings)
    assert result.passes[-1].objective < minimum * (1 + 1e-3)
    assert all(row.saved > 0 for row in result.filters)


def test_the_seed_decides_everything(problem):
    first, again, other = (
        train(problem, passes=2, delay=3, seed=seed).weights for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_death_of_a_server_changes_nothing(problem):
    settings = Settings(l1=L1, passes=3, blocks=6, delay=2, **LOSSLESS)

    def run(kill):
        training = Training(*problem, settings, 3, 3, replicas=2)

        def say(done):
            if kill and done.number == 1:
                training.store.remove_server("server 1", dead=True)

        return training.run(say)

    whole, struck = run(False), run(True)
    np.testing.assert_array_equal(whole.weights, struck.weights)
    assert whole.sent == struck.sent


def test_a_server_that_forgot_the_keys_is_sent_them(problem):
    settings = Settings(l1=L1, passes=3, blocks=6, delay=0, key_caching=True)
    training = Training(*problem, settings, 2, 2)
    decode, forgotten = training.filters.pushes.decode, []

    def forgetful(packet, memory):
        if packet.keys is None and not forgotten:
            forgotten.append(memory.clear())
        return decode(packet, memory)

    training.filters.pushes.decode = forgetful
    expected = train(problem, passes=3).weights
    np.testing.assert_array_equal(training.run().weights, expected)
    assert forgotten


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(l1=0), "l1=0: use"),
        (dict(damping=float("nan")), "damping=nan: use"),
        (dict(passes=0), "passes=0: use"),
        (dict(delay=6), "delay=6 with blocks=6: use"),
        (dict(kkt_ratio=-1), "kkt_ratio=-1: use"),
        (dict(compression="zip"), "compression='zip'"),
        (dict(skip=1.0), "probability=1.0"),
        (dict(blocks=401), "parts=401: use"),
        (dict(num_workers=601), "601 workers for 600 rows: use"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(problem, changes, words):
    with pytest.raises(MeshparError, match=words):
        train(problem, **changes)


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().l1 = 3
