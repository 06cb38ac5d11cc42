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


def alone(run):
    """x [rows, columns] -> the result of one matrix."""
    closed = jax.make_jaxpr(run)(X, W)

    def one(x, w):
        (result,) = OneOfBatch().evaluate(closed, [Part(x[None], 0), Part(w)])
        if result.dim != 0:
            raise MixesBatchError
        return result.array[0]

    return one


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
