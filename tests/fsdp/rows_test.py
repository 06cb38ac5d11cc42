"""Gradients of a layer that are added to their row of a stack."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from support.tpu_programs import tpu

from meshpar import mesh
from meshpar.fsdp import rows
from meshpar.mesh import platform


@pytest.mark.parametrize("on", [None, True, False])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("kind", [platform.CPU, platform.TPU])
def test_one_row_grows_and_the_others_stay(monkeypatch, kind, depth, on):
    monkeypatch.setattr(rows, "traced_platform", lambda: kind)
    draws = np.random.default_rng(depth)
    total = draws.normal(size=(depth, 4, 2)).astype(np.float32)
    new = draws.normal(size=(4, 2)).astype(jnp.bfloat16)
    wanted = total.copy()
    wanted[-1] += 0 if on is False else new.astype(np.float32)

    @jax.jit
    def added(total, new, row):
        mask = None if on is None else jnp.asarray(on)
        return rows.add_to_row({"w": total}, {"w": new}, row, mask)["w"]

    np.testing.assert_array_equal(added(total, new, depth - 1), wanted)


@tpu
def test_on_tpus_a_row_is_added_to_where_it_lies(monkeypatch):
    """No instruction of the compiled loop has a copy of one row."""
    monkeypatch.setattr(rows, "traced_platform", lambda: platform.TPU)
    (device, *_) = mesh.topology("v5e:2x2")
    depth, shape = 4, (512, 256)

    def summed(total, xs, ys):
        def body(total, layer):
            new = {"w": jnp.tanh(xs[layer]).T @ ys[layer]}
            return rows.add_to_row(total, new, layer, None), None

        return jax.lax.scan(body, total, jnp.arange(depth))[0]

    def like(*shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    total = {"w": like(depth, *shape, dtype=jnp.float32)}
    xs, ys = (like(depth, 1024, size, dtype=jnp.bfloat16) for size in shape)
    text = jax.jit(summed, donate_argnums=0).lower(total, xs, ys).compile().as_text()
    inner = re.sub(r"(?ms)^%fused_computation.*?^}", "", text)
    assert re.search(rf"= f32\[{depth},512,256\]\S* fusion\(", inner)
    assert not re.search(r"= f32\[(1,)?512,256\]", inner)
