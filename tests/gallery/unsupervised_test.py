"""CD-1 and sparse coding: the textbook updates, on one device and sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.marks import first

from experiments.gallery import digits, unsupervised
from experiments.gallery import unsupervised_models as models

KINDS = (unsupervised.MACHINE, unsupervised.CODES)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def machine(seed=0):
    model = models.boltzmann(64, 32)
    params = {p: np.array(x) for p, x in model.init(jax.random.key(seed)).items()}
    draws = np.random.default_rng(seed)
    params["weight"] += draws.normal(size=(64, 32)) / 4
    params["visible"] += draws.normal(size=64)
    params["hidden"] += draws.normal(size=32)
    return model, params


@pytest.mark.slow
def test_the_gradient_is_that_of_contrastive_divergence():
    model, params = machine()
    v0, key = digits.load()[0].x[:16], jax.random.key(3)

    def loss(params):
        return models.divergence(model.bind(params), {"x": v0}, key)[0]

    found = jax.grad(loss)({path: jnp.array(x) for path, x in params.items()})
    weight, visible, hidden = (params[p] for p in ("weight", "visible", "hidden"))
    p0 = sigmoid(v0 @ weight + hidden)
    h0 = np.asarray(jax.random.uniform(key, p0.shape)) < p0
    v1 = sigmoid(h0 @ weight.T + visible)
    p1 = sigmoid(v1 @ weight + hidden)
    expected = {
        "weight": (v1.T @ p1 - v0.T @ p0) / len(v0),
        "visible": (v1 - v0).mean(0),
        "hidden": (p1 - p0).mean(0),
    }
    for path, gradient in expected.items():
        np.testing.assert_allclose(found[path], gradient, rtol=0, atol=1e-6)


def test_codes_are_at_the_minimum_of_the_objective():
    """No code can move without a loss: the conditions of optimality hold."""
    model = models.sparse_coder(64, 32, 1.0)
    coder = model.bind(model.init(jax.random.key(0)))
    x = digits.load()[0].x[:8]
    codes, bases = np.asarray(coder.codes(x)), np.asarray(coder.bases())
    slopes = (codes @ bases.T - x) @ bases
    used = codes != 0
    assert 0.02 < used.mean() < 0.9
    np.testing.assert_allclose(slopes[used], -np.sign(codes[used]), atol=0.02)
    assert np.abs(slopes[~used]).max() <= 1.02


@pytest.mark.slow
@pytest.mark.parametrize("kind", first(1, KINDS))
def test_sharded_training_equals_one_device(kind):
    assert unsupervised.sharded_error(kind, digits.load()[0].x) < 1e-9


def test_noise_that_differs_between_meshes_is_found(monkeypatch):
    """The error shows noise that depends on the mesh, as a seed per run does."""
    train, seeds = models.train, iter((0, 1))

    def other_noise(program, x, steps, rows, seed):
        program.init(0)
        monkeypatch.setattr(type(program), "init", with_seed(next(seeds)))
        return train(program, x, steps, rows, seed)

    init = models.meshpar.TrainProgram.init

    def with_seed(seed):
        def start(self, _=0, params=None):
            return init(self, seed, init(self, 0).params)

        return start

    monkeypatch.setattr(models, "train", other_noise)
    error = unsupervised.sharded_error(unsupervised.MACHINE, digits.load()[0].x)
    assert error > 1e-4
