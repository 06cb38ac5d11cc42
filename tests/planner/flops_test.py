"""FLOPs counted in traces, loops and grouped matmuls included."""

import jax
import jax.numpy as jnp
import optax
from support.tpu_programs import small

from meshpar.lowering.layer_residuals import GroupedRows, grouped_rows
from meshpar.planner.facts import Facts
from meshpar.planner.flops import in_float8, matmul_flops
from meshpar.runs import programs
from meshpar.runs.config import with_settings

OPTIMIZER = optax.adamw(1e-2)


def test_flops_count_loops_and_grouped_matmuls():
    rows, weights = jnp.ones((6, 4)), jnp.ones((3, 4, 5))
    sizes = jnp.array([2, 2, 2])

    @jax.jit
    def grouped(rows):
        return jax.lax.ragged_dot(rows, weights, sizes)

    def layer(rows):
        def body(x, _):
            return x @ jnp.ones((4, 4)), grouped(x)

        return jax.lax.scan(body, rows, length=7), grouped(rows), grouped(rows)

    assert matmul_flops(jax.make_jaxpr(layer)(rows).jaxpr) == (
        7 * 2 * 6 * 4 * 4 + 9 * 2 * 6 * 4 * 5
    )
    args = (jnp.stack([x, x]) for x in (rows, weights, sizes))
    batched = jax.make_jaxpr(jax.vmap(jax.lax.ragged_dot))(*args)
    assert matmul_flops(batched.jaxpr) == 2 * 2 * 6 * 4 * 5
    # Rows read, as wide as the activations, and written, of each of two calls.
    twice = jax.make_jaxpr(lambda x: (grouped(x), grouped(x)))(rows).jaxpr
    assert grouped_rows(twice, rows) == GroupedRows(
        whole=2 * 4 * 6 * 4, split=2 * 4 * 6 * 5
    )


def test_matmuls_in_float8_are_told_apart():
    x, low = jnp.ones((6, 4)), jnp.ones((4, 5), jnp.float8_e4m3fn)

    def layer(x, low):
        return low.T @ x.astype(low.dtype).T, x @ low.astype(x.dtype), x.T @ x

    jaxpr = jax.make_jaxpr(layer)(x, low).jaxpr
    assert matmul_flops(jaxpr, in_float8) == 2 * 6 * 4 * 5
    assert matmul_flops(jaxpr) == 2 * (2 * 6 * 4 * 5) + 2 * 6 * 4 * 4


def test_loops_of_experts_count_all_rounds():
    """Where there is no ragged_dot, such as on CPUs."""
    settings = ["model.num_experts=4", "model.routing=dropless", "model.mlp=512"]
    config = with_settings(small(), settings)
    made = config.make_model()
    rows, dtype = config.abstract_batch(), programs.compute_dtype(config)
    facts = Facts(made, OPTIMIZER, rows, dtype, jax.devices())
    experts = 2 * 3 * 2 * 512 * 512 * 256
    dense = Facts(small().make_model(), OPTIMIZER, rows, dtype, jax.devices())
    rest = dense.flops.layer - 3 * 2 * 512 * 2048 * 256
    assert experts < facts.flops.layer - rest < 1.6 * experts
