"""Push-sum on 8 devices against its recurrence; graphs and their matrices."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import meshpar
from meshpar.errors import MeshparError
from meshpar.local_sgd import Gossip
from meshpar.methods import push_sum

REPLICAS, NUMBERS, ROUNDS = 8, 3, 5
GRAPHS = {
    "ring": push_sum.ring(REPLICAS),
    "directed ring": push_sum.ring(REPLICAS, directed=True),
    "exponential": push_sum.exponential(REPLICAS),
    "random": push_sum.random_graph(REPLICAS, 2),
    "random, directed": push_sum.random_graph(REPLICAS, 2, directed=True),
}


def on_devices(matrix, x):
    layout = meshpar.layouts.parse(f"replica={REPLICAS}")
    mesh = meshpar.mesh.make_mesh(layout, jax.devices()[:REPLICAS])
    spec = PartitionSpec("replica")

    def run(x):
        x, weight = x[0], jnp.float32(1)
        for _ in range(ROUNDS):
            x, weight = push_sum.mix(x, weight, matrix, "replica")
        return x[None], weight[None]

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec))(x)


@pytest.mark.parametrize("name", ["exponential", "random, directed"])
def test_rounds_on_devices_equal_the_recurrence(name):
    sends = GRAPHS[name]
    x = np.random.default_rng(0).normal(size=(REPLICAS, NUMBERS)).astype(np.float32)
    found, weight = on_devices(push_sum.out_shares(sends), x)
    wanted, weights = x.astype(float), np.ones(REPLICAS)
    for _ in range(ROUNDS):  # Each replica hands out its shares, one after another.
        new, new_weights = np.zeros_like(wanted), np.zeros(REPLICAS)
        for i in range(REPLICAS):
            to = [i, *np.flatnonzero(sends[i])]
            for j in to:
                new[j] += wanted[i] / len(to)
                new_weights[j] += weights[i] / len(to)
        wanted, weights = new, new_weights
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    np.testing.assert_allclose(weight, weights, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_are_connected_and_matrices_keep_the_total(name):
    sends = GRAPHS[name]
    reached = np.linalg.matrix_power(sends + np.eye(REPLICAS), REPLICAS)
    assert (reached > 0).all()
    np.testing.assert_allclose(push_sum.out_shares(sends).sum(0), 1)
    if "directed" in name or name == "exponential":
        with pytest.raises(MeshparError, match="use out_shares"):
            push_sum.metropolis(sends)
        return
    matrix = push_sum.metropolis(sends)
    np.testing.assert_array_equal(matrix, matrix.T)
    assert ((matrix > 0) == (sends | np.eye(REPLICAS, dtype=bool))).all()
    assert len(Gossip([matrix]).rounds(REPLICAS)) == 1


def test_pairs_are_neighbours_and_all_of_them_are_drawn():
    sends = GRAPHS["random"]
    matrices = list(itertools.islice(push_sum.pairs(sends), 500))
    drawn = set()
    for matrix in matrices:
        assert np.isin(matrix, [0, 0.5, 1]).all() and (matrix.sum(1) == 1).all()
        one, other = np.flatnonzero(matrix.diagonal() == 0.5)
        assert sends[one, other] and matrix[one, other] == matrix[other, one] == 0.5
        drawn.add((one, other))
    assert len(drawn) == sends.sum() / 2
    assert len(Gossip(matrices[:3]).rounds(REPLICAS)) == 3


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: push_sum.ring(1), "use at least two"),
        (lambda: push_sum.random_graph(4, 4), "degree=4 of 4 replicas"),
        (
            lambda: push_sum.out_shares(np.eye(3)),
            r"replicas \[0, 1, 2\] send to nobody",
        ),
        (lambda: push_sum.pairs(np.ones((2, 3))), r"shape \(2, 3\): give \[R, R\]"),
        (lambda: push_sum.mix(None, None, np.ones((2, 2)), "r"), "use out_shares"),
    ],
)
def test_bad_values(call, message):
    with pytest.raises(MeshparError, match=message):
        call()
