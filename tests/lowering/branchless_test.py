"""Functions run without conditionals: the same results, in and outside of calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshpar.lowering.branchless import without_branches

AXIS = "rows"


def function(x, key):
    """A switch inside a conditional inside a call, loops, a constant and noise."""
    constant = np.arange(3.0, dtype=np.float32)

    @jax.jit
    def inner(x):
        def switch(x):
            cases = [lambda x: x, lambda x: 2 * x, lambda x: x * 0 + constant]
            return jax.lax.switch(jnp.int32(x.sum()), cases, x)

        return jax.lax.cond(x[0] > 0, switch, lambda x: jnp.zeros(3), x)

    def step(sums, y):
        return sums + x[1] * y, sums * y

    noise = jax.random.normal(key, (3,))
    scanned = jax.lax.scan(step, jnp.ones(3), jnp.arange(4.0), reverse=True)
    looped = jax.lax.fori_loop(0, 2, lambda _, y: y + x, inner(x))
    return {"looped": looped, "noise": noise, "carry": scanned[0], "ys": scanned[1]}


@pytest.mark.parametrize("first", [-1.0, 0.1, 1.0, 2.0, 9.0])
def test_results_are_those_of_the_function(first):
    x = jnp.array([first, 0.0, 0.0])
    mesh = jax.make_mesh((2,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))

    def on_one(x, key):
        result = without_branches(function, (AXIS,), x[0], key)
        return jax.tree.map(lambda y: y[None], result)

    split = PartitionSpec(AXIS)
    run = jax.shard_map(
        on_one, mesh=mesh, in_specs=(split, PartitionSpec()), out_specs=split
    )
    key = jax.random.key(0)
    found = jax.jit(run)(jnp.stack([x, -x]), key)
    for row, own in enumerate((x, -x)):
        want = function(own, key)
        for name, value in want.items():
            np.testing.assert_allclose(found[name][row], value, rtol=1e-6)
    text = str(jax.make_jaxpr(run)(jnp.stack([x, -x]), key))
    assert "cond[" not in text and "select_n" in text
