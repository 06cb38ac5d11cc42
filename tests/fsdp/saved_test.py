"""Residuals pass through jit, buffers and scans, and their reader finds them again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshpar.fsdp.saved import Saved, VjpReader

DEPTH, WIDTH = 3, 8


def layer(weights, x, key):
    mask = jax.random.bernoulli(key, 0.7, x.shape)
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"] * mask


def values():
    keys = jax.random.split(jax.random.key(0), 4)
    weights = {
        "up": jax.random.normal(keys[0], (WIDTH, 16)),
        "down": jax.random.normal(keys[1], (16, WIDTH)),
    }
    return weights, jax.random.normal(keys[2], (5, WIDTH)), keys[3]


def save_layer(weights, x, key):
    y, vjp = jax.vjp(lambda weights, x: layer(weights, x, key), weights, x)
    return y, VjpReader.save(vjp, weights)


def test_arrays_and_random_keys_come_back():
    arrays = [jnp.arange(3.0), jax.random.key(7), jax.random.split(jax.random.key(1))]
    saved = Saved.of(arrays, "reader")
    assert not any(
        jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(saved)
    )
    through = jax.jit(lambda saved: saved)(saved)
    assert through.reader == "reader"
    for x, want in zip(through.unpack(), arrays, strict=True):
        assert x.dtype == want.dtype and x.shape == want.shape
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            x, want = jax.random.key_data(x), jax.random.key_data(want)
        np.testing.assert_array_equal(x, want)


def test_key_implementations_come_back():
    key = jax.random.key(3, impl="rbg")
    (again,) = Saved.of([key], None).unpack()
    assert jax.random.key_impl(again) == jax.random.key_impl(key)


def test_two_traces_of_one_function_have_one_structure():
    """A buffer made from one trace holds the residuals of another."""
    weights, x, key = values()
    first, second = (
        jax.eval_shape(lambda *args: save_layer(*args)[1], weights, x, key)
        for _ in range(2)
    )
    assert first.reader is not second.reader
    assert jax.tree.structure(first) == jax.tree.structure(second)
    assert hash(jax.tree.structure(first)) == hash(jax.tree.structure(second))
    zeros = jax.tree.map(lambda x: jnp.zeros((2, *x.shape), x.dtype), first)
    _, saved = save_layer(weights, x, key)
    filled = jax.tree.map(lambda buffer, x: buffer.at[1].set(x), zeros, saved)
    for x, want in zip(filled.arrays, saved.arrays, strict=True):
        np.testing.assert_array_equal(x[1], want)


@pytest.mark.parametrize(
    "other", [Saved.of([jnp.zeros(2)], "reader", "b"), Saved.of([jnp.zeros(2)], None)]
)
def test_residuals_of_other_kinds_have_another_structure(other):
    saved = Saved.of([jnp.zeros(2)], "reader", "a")
    assert jax.tree.structure(saved) != jax.tree.structure(other)
    with pytest.raises(ValueError):
        jax.tree.map(jnp.add, saved, other)


def test_weights_are_not_saved():
    """Else ZeRO-3 would keep every gathered weight."""
    weights, x, key = values()
    shapes = jax.eval_shape(lambda *args: save_layer(*args)[1], weights, x, key)
    saved_shapes = {leaf.shape for leaf in jax.tree.leaves(shapes)}
    assert not saved_shapes & {weight.shape for weight in weights.values()}
    paths = {path for path in shapes.reader.weights if path is not None}
    assert paths == {"up", "down"}


def test_a_vjp_reads_the_weights_that_it_is_given():
    weights, x, key = values()
    y, saved = save_layer(weights, x, key)
    gathered_again = jax.tree.map(lambda w: 2 * w, weights)
    dweights, _ = saved.reader.vjp(saved, gathered_again)(jnp.ones_like(y))
    # The gradient of `up` is linear in `down`; tanh's derivative was saved.
    want, _ = saved.reader.vjp(saved, weights)(jnp.ones_like(y))
    np.testing.assert_allclose(dweights["up"], 2 * want["up"], rtol=1e-5)
    np.testing.assert_allclose(dweights["down"], want["down"], rtol=1e-5)


def test_a_vjp_saved_in_one_scan_is_read_in_another():
    weights, x, key = values()
    stack = jax.tree.map(
        lambda w: jnp.stack([w / (i + 1) for i in range(DEPTH)]), weights
    )
    keys = jax.random.split(key, DEPTH)

    def loss(stack, x):
        for i in range(DEPTH):
            x = layer(jax.tree.map(lambda w, i=i: w[i], stack), x, keys[i])
        return jnp.square(x).sum()

    @jax.jit
    def backward(stack, x):
        def save(x, weights_and_key):
            return save_layer(weights_and_key[0], x, weights_and_key[1])

        def read(dy, weights_and_saved):
            weights, saved = weights_and_saved
            dweights, dx = saved.reader.vjp(saved, weights)(dy)
            return dx, dweights

        y, saved = lax.scan(save, x, (stack, keys))
        dx, dstack = lax.scan(read, 2 * y, (stack, saved), reverse=True)
        return dstack, dx

    for got, want in zip(
        jax.tree.leaves(backward(stack, x)),
        jax.tree.leaves(jax.grad(loss, (0, 1))(stack, x)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
