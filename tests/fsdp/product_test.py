"""Gradients that are left as matmuls equal those that are computed at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.marks import slow

from meshpar.fsdp.product import Product, whole, with_products

SHAPES = {"q": (8, 2, 6), "out": (2, 6, 8), "twice": (8, 8), "scale": (1, 1, 8)}


def layer(weights, x_BLD):
    q_BLNH = jnp.einsum("BLD,DNH->BLNH", x_BLD, weights["q"])
    y_BLD = jnp.einsum("BLNH,NHD->BLD", jnp.tanh(q_BLNH), weights["out"])
    y_BLD = jnp.tanh(y_BLD @ weights["twice"]) @ weights["twice"]
    return x_BLD + y_BLD * weights["scale"]


def backward(weights, args):
    x, dy = args
    remat = jax.checkpoint(layer, prevent_cse=False)
    return jax.vjp(jax.jit(remat), weights, x)[1](dy)


def arguments():
    rng = np.random.default_rng(0)
    weights = {path: jnp.float32(rng.normal(size=s)) for path, s in SHAPES.items()}
    return weights, tuple(jnp.float32(rng.normal(size=(3, 5, 8))) for _ in range(2))


def test_gradients_of_matmuls_are_products_and_others_are_arrays():
    want, want_dx = backward(*arguments())
    gradients, dx = with_products(backward, *arguments())
    kinds = {path: isinstance(x, Product) for path, x in gradients.items()}
    assert kinds == {"q": True, "out": True, "twice": False, "scale": False}
    np.testing.assert_allclose(dx, want_dx, rtol=1e-5, atol=1e-5)
    for path, gradient in gradients.items():
        assert gradient.shape == want[path].shape == SHAPES[path]
        np.testing.assert_allclose(whole(gradient), want[path], rtol=1e-5, atol=1e-5)


def test_no_matmul_is_done_twice():
    def dots(fn):
        text = jax.jit(fn).lower(*arguments()).as_text()
        return text.count("stablehlo.dot_general")

    def done(weights, args):
        gradients, dx = with_products(backward, weights, args)
        return {path: whole(x) for path, x in gradients.items()}, dx

    assert dots(done) == dots(backward)
    assert dots(lambda *args: with_products(backward, *args)[1]) < dots(backward)


@pytest.mark.parametrize("path", ["q", "out"])
@pytest.mark.parametrize("dim", [0, slow(1), 2])
def test_parts_are_cut_and_added(path, dim):
    product = with_products(backward, *arguments())[0][path]
    want = whole(product)
    for number, part in enumerate(np.split(want, 2, axis=dim)):
        alone = product.part(dim, jnp.int32(number), 2, None)
        np.testing.assert_allclose(alone, part, rtol=1e-5, atol=1e-5)
        added = product.part(dim, jnp.int32(number), 2, jnp.ones_like(part))
        np.testing.assert_allclose(added, 1 + part, rtol=1e-5, atol=1e-5)
    moved = whole(product.moved(dim))
    np.testing.assert_array_equal(moved, jnp.moveaxis(want, dim, 0))


def test_sums_of_narrow_products_are_rounded_once():
    rng = np.random.default_rng(0)
    lhs, rhs = (jnp.bfloat16(rng.normal(size=(64, 4))) for _ in range(2))
    numbers = (((0,), (0,)), ((), ()))
    product = Product(lhs, rhs, numbers, (0, 1), jnp.dtype(jnp.bfloat16))
    total = jnp.bfloat16(rng.normal(size=(4, 4)))
    exact = np.float32(lhs).T @ np.float32(rhs) + np.float32(total)
    found = product.part(0, jnp.int32(0), 1, total)
    np.testing.assert_array_equal(found, exact.astype(jnp.bfloat16))


def test_precision_and_source_are_those_of_the_matmul():
    def backward(weights, args):
        x, dy = args

        def matmul(weights, x):
            return jnp.matmul(x, weights["w"], precision="highest")

        return jax.vjp(matmul, weights, x)[1](dy)

    args = tuple(jnp.ones((5, 8), jnp.float32) for _ in range(2))
    weights = {"w": jnp.ones((8, 8), jnp.float32)}

    def parts(weights, args):
        product = with_products(backward, weights, args)[0]["w"]
        return product.part(0, jnp.int32(0), 2, None)

    equations = jax.make_jaxpr(parts)(weights, args).jaxpr.eqns
    *_, dot = (eqn for eqn in equations if eqn.primitive.name == "dot_general")
    assert dot.outvars[0].aval.size == 4 * 8
    assert dot.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
    assert "transpose" in str(dot.source_info.name_stack)
