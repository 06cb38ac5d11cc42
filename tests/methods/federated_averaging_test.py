"""Federated averaging against the paper's algorithm in numpy; who owns which rows."""

import itertools

import numpy as np
import pytest

from experiments.gallery import digits
from meshpar.errors import MeshparError
from meshpar.islands import updates
from meshpar.methods.federated import shards as split
from meshpar.methods.federated.averaging import FederatedAveraging, Settings

ROWS, RATE, OWNERS = 8, 0.3, 6


def gradient(w, x, y):
    """Of the mean cross-entropy of one hidden layer, in float64."""
    hidden = np.maximum(x @ w["up"], 0)
    scores = hidden @ w["down"]
    errors = np.exp(scores - scores.max(1, keepdims=True))
    errors /= errors.sum(1, keepdims=True)
    errors[np.arange(len(y)), y] -= 1
    errors /= len(y)
    back = (errors @ w["down"].T) * (hidden > 0)
    return {"up": x.T @ back, "down": hidden.T @ errors}


def federated(shards, chosen, rows, rounds, weights, samples):
    """McMahan et al., algorithm 1; `chosen` and `rows` are the draws."""
    x, y = samples["x"].astype(float), samples["y"]
    for number in range(rounds):
        clients = chosen(number)
        total = sum(len(shards[k]) for k in clients)
        new = {name: np.zeros_like(part) for name, part in weights.items()}
        for k in clients:
            own = dict(weights)
            for batch in rows(number, k):
                step = gradient(own, x[batch], y[batch])
                own = {name: own[name] - RATE * step[name] for name in own}
            for name in new:
                new[name] += len(shards[k]) / total * own[name]
        weights = new
    return weights


def owned(kind):
    labels = digits.load()[0].y[:120]
    return {
        "iid": lambda: split.iid(120, OWNERS),
        "by label": lambda: split.by_label(labels, OWNERS),
        "dirichlet": lambda: split.dirichlet(labels, OWNERS, 0.3),
    }[kind]()


KINDS = ("iid", "by label", "dirichlet")


@pytest.fixture(scope="module")
def program():
    return digits.lower("data=2", ROWS, RATE)


@pytest.fixture(scope="module")
def samples():
    training = digits.load()[0]
    return {"x": training.x[:120], "y": training.y[:120]}


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_equal_the_algorithm_in_numpy(program, samples, kind):
    shards, start = owned(kind), digits.start(1)
    settings = Settings(fraction=0.5, epochs=2, seed=3)
    found = FederatedAveraging(program, samples, shards, settings, params=start)
    for _ in range(3):
        found.round()
    exact = {name: x.astype(float) for name, x in start.items()}
    draws = found.chosen, found.rows, 3, exact, samples
    wanted = federated(shards, *draws)
    assert len(found.chosen(0)) == OWNERS // 2
    for name, x in wanted.items():
        np.testing.assert_allclose(found.params[name], x, rtol=0, atol=1e-6)
        assert np.abs(x - start[name]).max() > 0.05


def test_a_server_with_momentum_takes_the_mean_of_the_differences(program, samples):
    shards, start = owned("dirichlet"), digits.start(1)
    settings = Settings(fraction=1.0)
    update = updates.sgd(0.5, 0.9)
    options = dict(params=start, update=update)
    found = FederatedAveraging(program, samples, shards, settings, **options)
    weights = {name: x.astype(float) for name, x in start.items()}
    trace = dict.fromkeys(weights, 0.0)
    for number in range(3):
        found.round()
        one = lambda _, n=number: found.chosen(n)  # noqa: E731
        rows = lambda _, k, n=number: found.rows(n, k)  # noqa: E731
        mean = federated(shards, one, rows, 1, weights, samples)
        for name in weights:
            trace[name] = 0.9 * trace[name] + weights[name] - mean[name]
            weights[name] = weights[name] - 0.5 * trace[name]
    for name, x in weights.items():
        np.testing.assert_allclose(found.params[name], x, rtol=0, atol=1e-6)


def test_a_client_makes_its_epochs_over_its_own_rows_alone(program, samples):
    shards = [np.arange(8), np.arange(8, 18)]
    found = FederatedAveraging(program, samples, shards, Settings(epochs=3))
    counts = np.bincount(found.rows(0, 0).ravel(), minlength=120)
    assert counts[:8].tolist() == [3] * 8 and counts[8:].sum() == 0
    rows = found.rows(5, 1)
    assert rows.shape == (4, ROWS)
    counts = np.bincount(rows.ravel(), minlength=120)[8:18]
    assert sorted(counts) == [3] * 8 + [4] * 2 and set(rows.ravel()) <= set(shards[1])
    drawn = [found.chosen(number) for number in range(30)]
    assert all(len(clients) == 1 for clients in drawn)
    assert 8 < drawn.count([0]) < 22


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_has_one_owner(kind):
    assert sorted(itertools.chain(*owned(kind))) == list(range(120))


def test_labels_of_owners():
    labels = np.repeat(np.arange(10), 40)
    assert all(len(set(labels[x])) <= 2 for x in split.by_label(labels, 10))
    shares = {}
    for alpha in (0.05, 100.0):
        parts = split.dirichlet(labels, 10, alpha)
        counts = np.array([np.bincount(labels[x], minlength=10) for x in parts])
        shares[alpha] = (counts.max(0) / 40).mean()
    assert shares[0.05] > 0.7 > 0.2 > shares[100.0]


def test_the_parts_of_a_batch_have_owners():
    labels = np.repeat(np.arange(4), 10)
    shards = [np.flatnonzero(labels == i) for i in range(4)]
    samples = {"y": labels, "row": np.arange(40)}
    found = list(itertools.islice(split.batches(samples, shards, 8), 10))
    for batch in found:
        assert batch["y"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    rows = np.concatenate([batch["row"] for batch in found])
    assert np.bincount(rows).tolist() == [2] * 40


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: split.iid(3, 4), "4 owners of 3 rows: use 1 to 3"),
        (lambda: split.dirichlet(np.zeros(9), 2, 0.0), "alpha=0.0: use a number above"),
        (lambda: split.by_label(np.zeros(9), 5, 2), "10 owners of 9 rows"),
        (lambda: split.batches({}, [np.arange(3)] * 3, 8), "multiple"),
        (
            lambda: split.batches({}, [np.arange(0)], 8),
            r"1 of them without rows \(the first: \[0\]\)",
        ),
        (lambda: Settings(fraction=1.5), "fraction=1.5"),
        (lambda: Settings(epochs=0), "epochs=0"),
    ],
)
def test_bad_values(call, message):
    with pytest.raises(MeshparError, match=message):
        call()


def test_a_client_without_rows_is_refused(program, samples):
    with pytest.raises(
        MeshparError, match=r"2 owners, 1 of them without rows \(the first: \[1\]\)"
    ):
        FederatedAveraging(program, samples, [np.arange(2), np.arange(0)])
