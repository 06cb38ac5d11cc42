"""Matmuls in float8: as exact as their dtypes, forward and backward."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.marks import slow
from support.tiny_models import lower, model, relative_error

from meshpar.errors import MeshparError
from meshpar.ops import float8

E4M3, E5M2 = 2.0**-4, 2.0**-3
"""Largest relative errors of a rounded number."""


def operands(dtype=jnp.float32):
    draws = np.random.default_rng(0)
    shapes = (2, 5, 6, 8), (6, 8, 7), (2, 5, 7)
    return [jnp.asarray(draws.normal(size=s), dtype) for s in shapes]


def pulled(matmul, x, w, dy):
    y, pull = jax.vjp(lambda x, w: matmul(x, w, 2), x, w)
    return y, *pull(dy)


def test_results_and_gradients_have_the_errors_of_their_dtypes():
    x, w, dy = operands()
    got, want = (pulled(f, x, w, dy) for f in (float8.matmul, jnp.tensordot))
    for a, b, most in zip(got, want, (2 * E4M3, E4M3 + E5M2, E4M3 + E5M2), strict=True):
        assert a.shape == b.shape
        assert 1e-3 < relative_error({"": a}, {"": b}) < most


def test_what_float8_holds_is_exact():
    x, w, dy = (jnp.sign(a) for a in operands())
    for a, b in zip(
        pulled(float8.matmul, x, w, dy), pulled(jnp.tensordot, x, w, dy), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_dtypes_are_those_of_the_operands():
    results = pulled(float8.matmul, *operands(jnp.bfloat16))
    assert {x.dtype for x in results} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("layout", [slow("data=2"), "fsdp=2,tensor=4,remat=dots"])
def test_a_layout_multiplies_by_every_weight_of_a_layer_in_float8(layout):
    program = lower(layout, model(float8=True))
    assert program.violations() == []
    text = program.lowered.as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    in_float8 = [line for line in dots if "f8E4M3FN" in line]
    assert sum("f8E5M2" in line for line in in_float8) == 2 * 7
    assert sum("f8E5M2" not in line for line in in_float8) >= 7


def test_experts_refuse_it():
    with pytest.raises(ValueError, match="float8=True: experts"):
        model(float8=True, num_experts=2)


def test_says_what_to_install(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MeshparError, match=r"meshpar\[float8\]"):
        float8.matmul(*operands()[:2], 2)
