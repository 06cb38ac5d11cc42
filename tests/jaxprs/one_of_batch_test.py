"""One matrix of a batch alone: equal to its part of the whole, or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshpar.jaxprs.one_of_batch import (
    MixesBatchError,
    OneOfBatch,
    Part,
    mixes_batch,
)

BATCH = 4
X = np.random.default_rng(0).normal(size=(BATCH, 3, 5)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(5, 5)).astype(np.float32)


def looped(x):
    def body(carry, rate):
        step, y = carry
        return (step + 1, y - rate * y @ y.swapaxes(1, 2) @ y), y.sum((1, 2))

    (_, y), sums = lax.scan(body, (0, x), jnp.array([0.1, 0.01]))
    return y + sums.sum(0)[:, None, None]


SEPARATE = {
    "elementwise": lambda x, w: jnp.where(x > 0, x, 2.0) * 3,
    "norms": lambda x, w: x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1),
    "grams": lambda x, w: x @ x.swapaxes(1, 2) @ x,
    "a plain matrix on the right": lambda x, w: x @ w,
    "and on the left": lambda x, w: jnp.einsum("ij,bkj->bki", w, x),
    "turned": lambda x, w: jnp.transpose(x, (2, 0, 1)).transpose(1, 2, 0),
    "flat": lambda x, w: x.reshape(1, BATCH, 15).reshape(BATCH, 5, 3),
    "a number for each": lambda x, w: (
        x * x.sum((1, 2), keepdims=True).reshape(BATCH)[:, None, None]
    ),
    "with dims of 1": lambda x, w: x[:, None].squeeze(1),
    "constants along it": lambda x, w: x + jnp.broadcast_to(w[0], x.shape),
    "factors": lambda x, w: jnp.linalg.cholesky(
        x @ x.swapaxes(1, 2) + jnp.eye(3)[None]
    ),
    "a loop": lambda x, w: looped(x),
    "many": lambda x, w: jax.vmap(lambda y: jnp.tanh(y @ w).sum() * y)(x),
}
MIXING = {
    "a sum over it": lambda x, w: x - x.sum(0, keepdims=True),
    "a product over it": lambda x, w: (
        jnp.einsum("bij,bkj->ik", x, x)[None] + x[:, :, :3]
    ),
    "neighbours": lambda x, w: x * jnp.roll(x, 1, 0),
    "in reverse": lambda x, w: x[::-1],
    "its place": lambda x, w: x * jnp.arange(BATCH)[:, None, None],
    "joined": lambda x, w: x.reshape(BATCH * 3, 5).reshape(3, BATCH, 5).swapaxes(0, 1),
    "a scan over it": lambda x, w: lax.scan(lambda c, y: (c + y, c), x[0], x)[1],
    "sorted": lambda x, w: jnp.sort(x, 0),
}


STACKS = np.random.default_rng(3).normal(size=(2, BATCH, 3, 5)).astype(np.float32)
"""Matrices along two dims, such as those of layers and experts."""

SEPARATE_STACKS = {
    "merged and split": lambda x, w: (
        looped(x.reshape(2 * BATCH, 3, 5)).reshape(x.shape) + x
    ),
    "a number for each": lambda x, w: (
        x * lax.reshape(x.sum((2, 3)), (2 * BATCH,)).reshape(2, BATCH)[..., None, None]
    ),
    "many of many": lambda x, w: jax.vmap(jax.vmap(lambda y: jnp.tanh(y @ w) * y))(x),
    "turned": lambda x, w: x.transpose(2, 0, 1, 3).transpose(1, 2, 3, 0),
    "factors": lambda x, w: (
        jnp.linalg.cholesky(x @ x.swapaxes(2, 3) + jnp.eye(3)[None, None]) @ x
    ),
    "norms": lambda x, w: x / (x**2).sum((2, 3))[..., None, None],
}
MIXING_STACKS = {
    "a sum over layers": lambda x, w: x - x.sum(0, keepdims=True),
    "a sum over experts": lambda x, w: x - x.sum(1, keepdims=True),
    "experts before layers": lambda x, w: x.swapaxes(0, 1),
    "experts with rows": lambda x, w: x.reshape(2, BATCH * 3, 5).reshape(x.shape),
    "rows first": lambda x, w: (
        x.transpose(2, 3, 0, 1).reshape(2 * BATCH, 15).reshape(x.shape)
    ),
    "other layers": lambda x, w: x * x[::-1],
    "apart": lambda x, w: x.transpose(0, 2, 1, 3).transpose(0, 2, 1, 3),
}


def alone(run, stack=X):
    """x [rows, columns] -> the result of one matrix."""
    closed, span = jax.make_jaxpr(run)(stack, W), stack.ndim - 2

    def one(x, w):
        own = Part(x.reshape(*(1,) * span, *x.shape), 0, span=span)
        (result,) = OneOfBatch().evaluate(closed, [own, Part(w)])
        if result.place != (0, span):
            raise MixesBatchError
        return result.array[(0,) * span]

    return one


@pytest.mark.parametrize("name", SEPARATE_STACKS)
def test_one_matrix_of_several_stacks_equals_its_part(name):
    run = SEPARATE_STACKS[name]
    each = jax.vmap(jax.vmap(alone(run, STACKS), (0, None)), (0, None))
    whole, one = jax.jit(run)(STACKS, W), jax.jit(each)(STACKS, W)
    np.testing.assert_allclose(one, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MIXING_STACKS)
def test_what_may_mix_matrices_of_several_stacks_is_refused(name):
    shapes = (jax.ShapeDtypeStruct(x.shape[-2:], x.dtype) for x in (STACKS, W))
    assert mixes_batch(alone(MIXING_STACKS[name], STACKS), *shapes)


@pytest.mark.parametrize("name", SEPARATE)
def test_one_matrix_alone_equals_its_part_of_the_batch(name):
    run = SEPARATE[name]
    whole, one = jax.jit(run)(X, W), jax.jit(jax.vmap(alone(run), (0, None)))(X, W)
    np.testing.assert_allclose(one, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MIXING)
def test_what_may_mix_matrices_is_refused(name):
    shapes = (
        jax.ShapeDtypeStruct(X.shape[1:], X.dtype),
        jax.ShapeDtypeStruct(W.shape, W.dtype),
    )
    assert mixes_batch(alone(MIXING[name]), *shapes)


def test_a_matrix_that_looks_like_the_batch_is_not_taken_for_it():
    """With as many rows as matrices."""
    square = np.random.default_rng(2).normal(size=(BATCH, BATCH, 5)).astype(np.float32)
    run = lambda x: (x.swapaxes(1, 2) @ x).sum(1)  # noqa: E731
    closed = jax.make_jaxpr(run)(square)
    (one,) = OneOfBatch().evaluate(closed, [Part(jnp.asarray(square[1:2]), 0)])
    np.testing.assert_allclose(one.array[0], run(square)[1], rtol=1e-5)
