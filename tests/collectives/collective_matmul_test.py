"""Collective matmuls equal a collective and a matmul, in the steps of a ring."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from meshpar.collectives.collective_matmul import (
    all_gather_matmul,
    matmul_reduce_scatter,
    parts_of,
    weight_gradient_of_parts,
)
from meshpar.contracts import hlo

N, AXIS = 4, "tensor"
ROWS, COLUMNS, LAST = (
    PartitionSpec(AXIS),
    PartitionSpec(None, AXIS),
    PartitionSpec(None, None, AXIS),
)


def mapped(fn, in_specs, out_specs):
    mesh = jax.make_mesh((N,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:N])
    run = jax.shard_map(
        fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(run)


def arrays(*shapes, dtype=np.float32):
    draws = np.random.default_rng(0)
    return [jnp.asarray(draws.normal(size=shape), dtype) for shape in shapes]


def permutes(run, *args):
    text = run.lower(*args).compile().as_text()
    found = hlo.parse_hlo(text, {AXIS: N})
    assert {c.kind for c in found} == {"permute"}
    return sum(c.executions for c in found), found[0].payload_bytes


def test_all_gather_matmul():
    x, w, heads = arrays((2, 8, 6), (6, 12), (6, 4, 3))

    def fn(x, w, heads):
        (y, z), _ = all_gather_matmul(x, [w, heads], AXIS)
        return y, z

    run = mapped(fn, (COLUMNS, COLUMNS, COLUMNS), (LAST, LAST))
    y, z = run(x, w, heads)
    np.testing.assert_allclose(y, x @ w, rtol=1e-5, atol=1e-5)
    want = jnp.einsum("BLD,DNH->BLNH", x, heads)
    np.testing.assert_allclose(z, want, rtol=1e-5, atol=1e-5)
    assert permutes(run, x, w, heads) == (N - 1, x.nbytes // N)


@pytest.mark.parametrize("first", [True, False])
def test_weight_gradients_are_summed_part_by_part(first):
    x, dy = arrays((2, 8, 6), (2, 8, 4, 3))

    def fn(x, dy):
        parts = parts_of(x, AXIS)
        return weight_gradient_of_parts(parts, dy, AXIS, first)

    run = mapped(fn, (COLUMNS, LAST), COLUMNS if first else ROWS)
    want = jnp.einsum("BLD,BLNH->DNH" if first else "BLD,BLNH->NHD", x, dy)
    np.testing.assert_allclose(run(x, dy), want, rtol=1e-5, atol=1e-5)
    text = run.lower(x, dy).compile().as_text()
    assert f"f32[{','.join(map(str, x.shape))}]" not in text  # The parts stay apart.
    assert permutes(run, x, dy) == (N - 1, x.nbytes // N)


@pytest.mark.parametrize("pairs", [1, 2])
def test_matmul_reduce_scatter(pairs):
    y, w, z, heads = arrays((2, 8, 12), (12, 6), (2, 8, 4, 3), (4, 3, 6))
    ys, weights = [y, z][:pairs], [w, heads][:pairs]

    def fn(ys, weights):
        return matmul_reduce_scatter(ys, weights, AXIS)

    run = mapped(fn, ([LAST] * pairs, [ROWS] * pairs), COLUMNS)
    want = y @ w + (jnp.einsum("BLNH,NHD->BLD", z, heads) if pairs == 2 else 0)
    np.testing.assert_allclose(run(ys, weights), want, rtol=1e-4, atol=1e-5)
    assert permutes(run, ys, weights) == (N - 1, want.nbytes // N)


def test_narrow_sums_are_rounded_once_a_step():
    """As those of a reduce_scatter in bfloat16: an addend and a sum are added wide."""
    y, w = arrays((1, N, 8 * N), (8 * N, 4), dtype=jnp.bfloat16)

    def fn(y, w):
        return matmul_reduce_scatter([y], [w], AXIS)

    found = mapped(fn, (LAST, ROWS), COLUMNS)(y, w)
    parts = [y[..., 8 * i : 8 * i + 8] @ w[8 * i : 8 * i + 8] for i in range(N)]
    for row in range(N):
        order = [(row + 1 + step) % N for step in range(N)]
        total = parts[order[0]][0, row]
        for device in order[1:]:
            wide = jnp.float32(total) + jnp.float32(parts[device][0, row])
            total = wide.astype(jnp.bfloat16)
        np.testing.assert_array_equal(found[0, row], total)
