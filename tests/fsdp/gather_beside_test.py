"""Gradients of activations that wait for reduced gradients of weights."""

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.fsdp.gather import gather_beside

X, LEAVES = {"x": jnp.arange(3.0), "count": jnp.arange(2)}, {"w": jnp.ones((2, 2))}


def gradients(reduce):
    run = gather_beside(lambda leaves: {"w": 2 * leaves["w"]}, reduce)

    def loss(x, leaves):
        x, whole = run({**X, "x": x}, leaves)
        return jnp.sum(x["x"] ** 2) + jnp.sum(whole["w"] ** 2)

    return jax.grad(loss, (0, 1))(X["x"], LEAVES)


def test_both_gradients_are_right():
    dx, dleaves = gradients(lambda grads: {"w": 2 * grads["w"]})
    np.testing.assert_array_equal(dx, 2 * X["x"])
    np.testing.assert_array_equal(dleaves["w"], 8 * np.ones((2, 2)))


def test_the_gradient_of_activations_depends_on_the_reduced_ones():
    """It is no number if they are none, though no number of theirs counts."""
    dx, _ = gradients(lambda grads: {"w": jnp.nan * grads["w"]})
    assert np.isnan(dx).all()
