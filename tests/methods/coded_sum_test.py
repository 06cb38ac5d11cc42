"""The coded sum in one program: exact whichever s workers are missing."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshpar
from meshpar.contracts import hlo
from meshpar.errors import MeshparError
from meshpar.methods.gradient_coding import codes
from meshpar.methods.gradient_coding.coded_sum import CodedSum

N, ROWS, DIM = 8, 3, 5
CODES = [(codes.cyclic, 2), (codes.fractional_repetition, 1)]


@pytest.fixture(scope="module")
def mesh():
    return meshpar.mesh.make_mesh(meshpar.layouts.parse(f"data={N}"))


@pytest.fixture(scope="module")
def parts():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, ROWS, DIM)).astype(np.float32)
    return {"x": x, "y": rng.normal(size=(N, ROWS)).astype(np.float32)}


def gradient(params, part):
    def loss(params):
        return jnp.square(part["x"] @ params["w"] + params["b"] - part["y"]).sum()

    return jax.grad(loss)(params)


PARAMS = {"w": jnp.linspace(-1, 1, DIM), "b": jnp.float32(0.3)}


@pytest.mark.parametrize("make, s", CODES)
def test_every_set_of_s_stragglers_gives_the_exact_sum(mesh, parts, make, s):
    with jax.enable_x64(True):
        check_every_set(mesh, jax.tree.map(np.float64, parts), make(N, s))


def check_every_set(mesh, parts, code):
    params = {"w": jnp.linspace(-1, 1, DIM), "b": jnp.float64(0.3)}
    coded, s = CodedSum(code, mesh, gradient), code.tolerates
    placed, step = coded.place(parts), jax.jit(coded.sum)
    want = jax.tree.map(
        lambda x: x.sum(0), jax.vmap(gradient, (None, 0))(params, parts)
    )
    for missing in itertools.combinations(range(N), s):
        alive = [i for i in range(N) if i not in missing]
        found = step(params, placed, coded.coefficients(alive))
        for path, x in want.items():
            np.testing.assert_allclose(found[path], x, rtol=0, atol=1e-9)


def test_what_a_missing_worker_computed_counts_nothing(mesh, parts):
    coded = CodedSum(codes.cyclic(N, 1), mesh, gradient)
    share, step = coded.coefficients(range(1, N)), jax.jit(coded.sum)
    placed = coded.place(parts)
    x = np.asarray(placed["x"]).copy()
    x[0] = np.nan
    spoiled = {**placed, "x": jax.device_put(x, placed["x"].sharding)}
    found = step(PARAMS, spoiled, share)
    np.testing.assert_array_equal(found["w"], step(PARAMS, placed, share)["w"])


def test_the_program_moves_one_sum_over_data(mesh, parts):
    coded = CodedSum(codes.cyclic(N, 1), mesh, gradient)
    args = PARAMS, coded.place(parts), coded.coefficients(range(N))
    text = jax.jit(coded.sum).lower(*args).compile().as_text()
    found = hlo.parse_hlo(text, dict(mesh.shape))
    assert {(c.kind, c.axes) for c in found} == {("all_reduce", ("data",))}
    assert sum(c.payload_bytes for c in found) == 4 * (DIM + 1)


def test_what_cannot_be(mesh, parts):
    with pytest.raises(MeshparError, match="a code for 4 workers on data=8"):
        CodedSum(codes.cyclic(4, 1), mesh, gradient)
    coded = CodedSum(codes.cyclic(N, 1), mesh, gradient)
    with pytest.raises(MeshparError, match=r"\[7\] parts for a code of 8"):
        coded.place({k: x[:7] for k, x in parts.items()})
    with pytest.raises(codes.StragglersError, match=r"workers \[0, 1\] are missing"):
        coded.coefficients(range(2, N))
