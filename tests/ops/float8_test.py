"""Matmuls in float8: as exact as their dtypes, forward and backward."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.marks import slow
from support.tiny_models import batch, host, lower, model, relative_error

from meshpar.errors import MeshparError
from meshpar.ops import float8

E4M3, E5M2 = 2.0**-4, 2.0**-3
"""Largest relative errors of a rounded number."""


def operands(dtype=jnp.float32):
    draws = np.random.default_rng(0)
    shapes = (2, 5, 6, 8), (6, 8, 7), (2, 5, 7)
    return [jnp.asarray(draws.normal(size=s), dtype) for s in shapes]


@functools.partial(jax.jit, static_argnums=0)
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


@pytest.mark.parametrize("layout", ["data=2", slow("fsdp=2,tensor=4,remat=dots")])
def test_a_layout_multiplies_by_every_weight_of_a_layer_in_float8(layout):
    program = lower(layout, model(float8=True))
    assert program.violations() == []
    text = program.lowered.as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    in_float8 = [line for line in dots if "f8E4M3FN" in line]
    assert sum("f8E5M2" in line for line in in_float8) == 2 * 7
    assert sum("f8E5M2" not in line for line in in_float8) >= 7


def test_devices_round_gradients_of_weights_as_one_does():
    x, w, dy = operands()
    x, w, dy = x.reshape(10, 48), w.reshape(48, 7), dy.reshape(10, 7)
    dy = dy * jnp.geomspace(1e-3, 1e3, len(dy))[:, None]  # Each device has its own.

    def pulled(x, w, dy, axes):
        w = jax.lax.pcast(w, axes, to="varying") if axes else w
        _, pull = jax.vjp(lambda w: float8._matmul(x, w, axes), w)
        (dw,) = pull(dy)
        return jax.lax.psum(dw, axes) if axes else dw

    mesh = Mesh(np.array(jax.devices()[:5]), ("data",))
    rows, whole = P("data"), P()
    split = jax.shard_map(
        lambda *args: pulled(*args, ("data",)),
        mesh=mesh,
        in_specs=(rows, whole, rows),
        out_specs=whole,
    )
    got, want = (
        jax.jit(split)(x, w, dy),
        jax.jit(pulled, static_argnums=3)(x, w, dy, ()),
    )
    assert relative_error({"": got}, {"": want}) < 1e-6


def quantized(x_RD, w_DF, dy_RF, axes=()):
    """All operands that a matmul multiplies, in float8, and their scales."""
    _, (x, w) = float8._forward(x_RD, w_DF, axes)
    by_row = float8._by_row(dy_RF, jnp.float8_e5m2)
    of_all = float8._of_all_tokens(dy_RF * x.scale, axes)
    return x.qvalue, x.scale, w.qvalue, w.scale, by_row.qvalue, by_row.scale, *of_all


@pytest.mark.parametrize("way", ["data=8", "fsdp=8", "tensor=2", "data=2,tensor=4"])
def test_layouts_multiply_the_same_numbers(way):
    """Bit for bit: a largest value does not depend on the order of its parts."""
    draws = np.random.default_rng(1)
    arrays = [
        jnp.asarray(draws.normal(size=shape) * 3.0, jnp.float32)
        for shape in ((16, 24), (24, 32), (16, 32))
    ]
    sizes = [int(item.split("=")[1]) for item in way.split(",")]
    axes = tuple(item.split("=")[0] for item in way.split(","))
    count = int(np.prod(sizes))
    mesh = Mesh(np.array(jax.devices()[:count]).reshape(sizes), axes)
    rows = axes[0] if axes[0] in ("data", "fsdp") else None
    columns = "tensor" if "tensor" in axes else None
    specs = P(rows), P("fsdp" if rows == "fsdp" else None, columns), P(rows, columns)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, specs, strict=True)
    ]
    want, got = jax.jit(quantized)(*arrays), jax.jit(quantized)(*placed)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def updates(layout):
    program = lower(layout, model(float8=True), optax.sgd(1.0))
    state = program.init()
    before = host(state.params)
    state, _ = program.step(state, batch())
    assert program.violations() == []
    return {path: x - before[path] for path, x in host(state.params).items()}


@pytest.fixture(scope="module")
def of_one_device():
    return updates("data=1")


@pytest.mark.parametrize(
    "layout",
    [
        slow("data=2,fsdp=2,context=2"),
        slow("data=8"),
        slow("fsdp=8"),
        "fsdp=2,tensor=2",
    ],
)
def test_layouts_round_alike(layout, of_one_device):
    # A sum in another order may round an activation to the next number of float8.
    assert relative_error(updates(layout), of_one_device) < 1e-2


def test_experts_refuse_it():
    with pytest.raises(ValueError, match="float8=True: experts"):
        model(float8=True, num_experts=2)


def test_says_what_to_install(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MeshparError, match=r"meshpar\[float8\]"):
        float8.matmul(*operands()[:2], 2)
