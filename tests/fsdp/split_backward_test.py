"""The two parts of a split backward pass equal the whole, and repeat nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.fsdp.split_backward import SplitBackward
from meshpar.jaxprs.straight_line import slots_of

WIDTH = 8


def layer(weights, x):
    h = jax.nn.gelu(x @ weights["up"])
    return x + jax.jit(lambda h: h @ weights["down"])(h) * weights["scale"]


def dots(fn, *args):
    return jax.jit(fn).lower(*args).as_text().count("stablehlo.dot_general")


@pytest.mark.parametrize("remat", [False, True])
def test_two_parts_are_the_whole(remat):
    keys = jax.random.split(jax.random.key(0), 4)
    weights = {
        "up": jax.random.normal(keys[0], (WIDTH, 32)),
        "down": jax.random.normal(keys[1], (32, WIDTH)),
        "scale": jnp.linspace(0.5, 1.5, WIDTH)[None],
    }
    x, dy = (jax.random.normal(key, (5, WIDTH)) for key in keys[2:])
    fn = jax.checkpoint(layer) if remat else layer

    def backward(weights, args):
        return jax.vjp(fn, weights, args[0])[1](args[1])

    split = SplitBackward.of(backward, weights, (x, dy))
    dx, state = jax.jit(split.run_first)(weights, (x, dy))
    gradient = jax.jit(split.run_second)(weights, state)
    want, want_dx = jax.jit(backward)(weights, (x, dy))
    np.testing.assert_allclose(dx, want_dx, rtol=1e-4, atol=1e-4)
    for name, value in want.items():
        np.testing.assert_allclose(gradient[name], value, rtol=1e-4, atol=1e-4)
    # The parts have as many matmuls as the whole; only W needs h @ down, for the scale.
    assert dots(split.run_first, weights, (x, dy)) == 3
    assert dots(split.run_second, weights, state) == 3
    assert dots(backward, weights, (x, dy)) == 6
    # W does not read `scale`, which zero=3 would have to gather again.
    read = {x for step in split.second for x in slots_of(step.operands)}
    assert not read & set(split.program.inputs[1:2])
