"""FLOPs of matmuls are those of loops over their products."""

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.jaxprs.flops import equation_flops
from meshpar.jaxprs.walk import equations


def test_grouped_matmuls_and_their_gradients_take_a_product_for_each_row():
    rows, inner, outer, groups = 48, 10, 6, 4
    x, w = jnp.ones((rows, inner)), jnp.ones((groups, inner, outer))
    sizes = jnp.array([7, 0, 21, 20])

    def fn(x, w):
        return jnp.sin(lax.ragged_dot(x, w, sizes)).sum()

    closed = jax.make_jaxpr(jax.grad(fn, (0, 1)))(x, w)
    found = [flops for eqn in equations(closed.jaxpr) if (flops := equation_flops(eqn))]
    assert found == [2.0 * rows * inner * outer] * 3


def test_a_batched_matmul_takes_a_product_for_each_number_of_its_result():
    x, w = jnp.ones((3, 5, 7)), jnp.ones((3, 7, 2))
    (eqn,) = jax.make_jaxpr(jnp.matmul)(x, w).jaxpr.eqns
    assert equation_flops(eqn) == 2 * 3 * 5 * 7 * 2
