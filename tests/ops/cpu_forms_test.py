"""Forms for CPUs equal those of jax: attention, activations and matmuls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.marks import slow

from meshpar.collectives.collective_matmul import contract, weight_gradient
from meshpar.ops import activations
from meshpar.ops.attention_by_heads import attention_by_heads
from meshpar.ops.attention_kernels import reference


def arrays(*shapes, dtype=jnp.float32, scale=1.0):
    draws = np.random.default_rng(0)
    return [jnp.asarray(scale * draws.normal(size=s), dtype) for s in shapes]


def with_gradients(fn, *args):
    """fn(*args), and its gradients for a cotangent without symmetry."""

    @jax.jit
    def run(*args):
        y, vjp = jax.vjp(fn, *args)
        cotangent = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return y, *vjp(cotangent.astype(y.dtype))

    return run(*args)


def assert_close(found, wanted, tolerance):
    for x, want in zip(found, wanted, strict=True):
        assert x.dtype == want.dtype and x.shape == want.shape
        x, want = np.float32(x), np.float32(want)
        assert np.linalg.norm(x - want) <= tolerance * np.linalg.norm(want)


@pytest.mark.parametrize("kv_heads", [1, slow(2), 4])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_attention_by_heads(kv_heads, window, packed):
    q, k, v = arrays((2, 7, 4, 8), (2, 7, kv_heads, 8), (2, 7, kv_heads, 8), scale=3)
    segments = jnp.array([[0, 0, 0, 1, 1, 2, 2], [0] * 7]) if packed else None

    def own(q, k, v):
        return attention_by_heads(q, k, v, segments, window)

    def theirs(q, k, v):
        return reference(q, k, v, segments, window=window)

    assert_close(with_gradients(own, q, k, v), with_gradients(theirs, q, k, v), 1e-5)


def test_attention_by_heads_in_half_precision_and_with_large_scores():
    shapes = [(2, 16, 4, 8)] * 3
    q, k, v = arrays(*shapes, dtype=jnp.bfloat16)
    found, wanted = attention_by_heads(q, k, v), reference(q, k, v)
    assert_close([found], [wanted], 1e-2)
    q, k, v = arrays(*shapes, scale=300)
    found, wanted = attention_by_heads(q, k, v), reference(q, k, v)
    assert_close([found], [wanted], 1e-5)


def test_activations_and_their_slopes():
    x, up = arrays((5, 64), (5, 64), scale=4)
    found, wanted = (with_gradients(fn, x) for fn in (activations.gelu, jax.nn.gelu))
    assert_close(found, wanted, 1e-5)

    def swiglu(gate, up):
        return jax.nn.silu(gate) * up

    found, wanted = (with_gradients(f, x, up) for f in (activations.swiglu, swiglu))
    assert_close(found, wanted, 1e-5)


def test_one_array_is_saved_for_each_slope():
    x, up = arrays((5, 64), (5, 64))
    saved = jax.tree.leaves(jax.vjp(activations.gelu, x)[1])
    assert [s.shape for s in saved] == [x.shape]
    assert len(jax.tree.leaves(jax.vjp(activations.swiglu, x, up)[1])) == 2


def test_matmuls_of_two_dims():
    x, q, o, dy = arrays((2, 3, 8), (8, 4, 2), (4, 2, 8), (2, 3, 4, 2))
    np.testing.assert_allclose(contract(x, q), jnp.tensordot(x, q, 1), 1e-5, 1e-5)
    np.testing.assert_allclose(contract(dy, o, 2), jnp.tensordot(dy, o, 2), 1e-5, 1e-5)
    want = jnp.einsum("BLD,BLNH->DNH", x, dy)
    np.testing.assert_allclose(weight_gradient(x, dy), want, 1e-5, 1e-5)
    program = jax.jit(lambda x, w: contract(x, w)).lower(x, q).as_text()
    assert "tensor<6x8xf32>, tensor<8x8xf32>" in program
