"""Sums over few blocks are additions, with the numbers of the sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from meshpar import layouts
from meshpar.jaxprs.walk import equations
from meshpar.mesh import platform
from meshpar.ops import attention_kernels
from meshpar.ops.block_sums import by_additions


def sums(fn, *args):
    """Shapes that a function sums over leading dims, and its results."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    reductions = (e for e in equations(jaxpr.jaxpr) if e.primitive.name == "reduce_sum")
    return [e.invars[0].aval.shape for e in reductions], jax.jit(fn)(*args)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_few_blocks_are_added_and_more_are_summed(dtype):
    @jax.jit
    def fn(few, many):
        return {"few": few.sum(axis=1), "many": many.sum(axis=0), "last": few.sum()}

    draws = np.random.default_rng(0)
    shapes = (3, 4, 5, 6), (9, 7)
    args = [jnp.asarray(draws.normal(size=shape), dtype) for shape in shapes]
    shapes, found = sums(by_additions(fn), *args)
    assert shapes == [(9, 7), (3, 4, 5, 6)]
    for name, want in fn(*args).items():
        assert found[name].dtype == want.dtype
        np.testing.assert_allclose(np.float32(found[name]), np.float32(want), rtol=1e-6)


def test_casts_of_blocks_are_not_made_of_all_at_once():
    x = jnp.ones((4, 6), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(by_additions(lambda x: x.sum(axis=0)))(x)
    cast = [e for e in equations(jaxpr.jaxpr) if "convert" in e.primitive.name]
    read = [e for e in equations(jaxpr.jaxpr) if e.primitive.name == "add"]
    assert len(read) == 3 and all(e.invars[0].aval.dtype == "float32" for e in read)
    used = {v for e in read for v in e.invars}
    assert {e.outvars[0].aval.shape for e in cast if e.outvars[0] in used} == {(6,)}


def test_gradients_of_queries_are_added_over_blocks_of_keys(monkeypatch):
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    splash = functools.partial(attention_kernels.splash_by_heads, interpret=True)
    monkeypatch.setattr(attention_kernels, "splash_by_heads", splash)
    monkeypatch.setattr(attention_kernels, "traced_platform", lambda: platform.TPU)
    draws = np.random.default_rng(0)
    shape = 2, 384, 1, 128  # Three blocks of keys.
    qkv = [jnp.asarray(draws.normal(size=shape), jnp.float32) for _ in range(3)]
    weights = jnp.asarray(draws.normal(size=shape), jnp.float32)

    def gradients(attention, *qkv):
        with layouts.use(layouts.parse("data=1"), mesh, ()):
            loss = lambda *qkv: (attention(*qkv) * weights).sum()  # noqa: E731
            return jax.grad(loss, argnums=(0, 1, 2))(*qkv)

    with jax.set_mesh(mesh):
        run = functools.partial(gradients, attention_kernels.by_platform)
        shapes, found = sums(run, *qkv)
        expected = jax.jit(functools.partial(gradients, attention_kernels.reference))
        for x, want in zip(found, expected(*qkv), strict=True):
            np.testing.assert_allclose(x, want, rtol=2e-3, atol=2e-3)
    # Sums are left over other dims, such as head_dim.
    assert (2, 3, 1, 384, 128) not in shapes and (3, 1, 384, 128) not in shapes
