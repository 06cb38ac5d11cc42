"""Sufficient factors: the dense gradient, its collectives, and the picker."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import meshpar
from meshpar.contracts.hlo import parse_hlo
from meshpar.methods import sufficient_factors as factors

DEVICES, ROWS, IN, OUT = 8, 32, 48, 24


def gradients_on_devices():
    """(gradients of x and W through the factors, dense gradients, collectives)."""
    mesh = meshpar.mesh.make_mesh(meshpar.layouts.parse(f"data={DEVICES}"))
    draws = np.random.default_rng(0)
    x = draws.normal(size=(ROWS, IN)).astype(np.float32)
    w = draws.normal(size=(IN, OUT)).astype(np.float32) / 7

    def loss(x, w):
        return jnp.sum(jnp.sin(factors.dense(x, w, "data")))

    rows, whole = PartitionSpec("data"), PartitionSpec()
    gradient = jax.shard_map(
        jax.grad(loss, argnums=(0, 1)),
        mesh=mesh,
        in_specs=(rows, whole),
        out_specs=(rows, whole),
    )
    placed = [
        jax.device_put(array, NamedSharding(mesh, spec))
        for array, spec in ((x, rows), (w, whole))
    ]
    compiled = jax.jit(gradient).lower(*placed).compile()
    dy = np.cos(x @ w)
    found = parse_hlo(compiled.as_text(), dict(mesh.shape))
    return compiled(*placed), (dy @ w.T, x.T @ dy), found


def test_factors_give_the_dense_gradient_and_only_gather():
    found, dense, collectives = gradients_on_devices()
    for ours, theirs in zip(found, dense, strict=True):
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert error < 1e-6
    assert {c.kind for c in collectives} == {"all_gather"}
    sent = sum(c.wire_bytes for c in collectives)
    assert sent == factors.factor_bytes(ROWS, IN, OUT, DEVICES)


@pytest.mark.parametrize("num_in, num_out", [(25088, 4096), (4096, 4096), (48, 24)])
@pytest.mark.parametrize("n", [2, 8, 64])
def test_the_picker_flips_where_the_bytes_do(num_in, num_out, n):
    edge = int(factors.most_rows(num_in, num_out))
    for rows in (1, edge - 1, edge, edge + 1, 100 * edge):
        fewer = factors.factor_bytes(rows, num_in, num_out, n) < factors.dense_bytes(
            num_in, num_out, n
        )
        assert factors.pick(rows, num_in, num_out) == (
            factors.FACTORS if fewer else factors.DENSE
        )


def test_bad_shapes_are_errors():
    x, w = jnp.zeros((2, 3, 4)), jnp.zeros((4, 5))
    with pytest.raises(ValueError, match=r"x\[2, 3, 4\] and W\[4, 5\]: use x"):
        factors.dense(x, w, "data")
    with pytest.raises(ValueError, match="'rows': 0"):
        factors.pick(0, 4, 4)
