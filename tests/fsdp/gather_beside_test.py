"""Gradients of activations that wait for reduced gradients of weights."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshpar.fsdp.gather_order import gather_beside
from meshpar.fsdp.sharding import ManualSharding
from meshpar.mesh.order import after, in_turn

X, LEAVES = {"x": jnp.arange(3.0), "count": jnp.arange(2)}, {"w": jnp.ones((2, 2))}
SHARDINGS = {"w": ManualSharding((), (), PartitionSpec())}


def gradients(reduce):
    run = gather_beside(lambda leaves: {"w": 2 * leaves["w"]}, reduce, SHARDINGS)

    def loss(x, leaves):
        x, whole = run({**X, "x": x}, leaves)
        return jnp.sum(x["x"] ** 2) + jnp.sum(whole["w"] ** 2)

    return jax.grad(loss, (0, 1))(X["x"], LEAVES)


def test_both_gradients_are_right():
    dx, dleaves = gradients(lambda grads: {"w": 2 * grads["w"]})
    np.testing.assert_array_equal(dx, 2 * X["x"])
    np.testing.assert_array_equal(dleaves["w"], 8 * np.ones((2, 2)))


def test_the_gradient_of_activations_depends_on_the_reduced_ones():
    def dx(x, leaves):
        def loss(x):
            x, whole = run(x, leaves)
            return jnp.sum(x**2) * jnp.sum(whole["w"] ** 2)

        run = gather_beside(lambda leaves: leaves, reduce, SHARDINGS)
        return jax.grad(loss)(x)

    def reduce(grads):
        return jax.tree.map(jnp.sort, grads)

    assert " sort(" in jax.jit(dx).lower(X["x"], LEAVES).compile().as_text()


def test_numbers_do_not_change_where_what_they_wait_for_is_no_number():
    """A gradient that is no number would stand in all others and in the loss."""
    first, later = jnp.array([jnp.nan, 1.0]), jnp.array([2.0, 3.0])
    waiting = after({"w": first}, {"x": later, "n": 3 * X["x"]})
    chex.assert_trees_all_equal(waiting, {"x": later, "n": 3 * X["x"]})
    np.testing.assert_array_equal(in_turn(first, later), later)
