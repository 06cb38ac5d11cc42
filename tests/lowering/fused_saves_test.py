"""What layers without a loop save, where compilers fuse what is elementwise."""

import jax
import jax.numpy as jnp
from support import tiny_stack

from meshpar.lowering.layer_residuals import fused_bytes, residuals_of

ROWS, WIDE = 6, 8


def two_matmuls(weights, x):
    """x[R, W] -> x plus a product of an elementwise value of x @ a."""
    h = x @ weights["a"]
    h = jnp.tanh(h) * jnp.cos(jnp.exp(h))
    return x + h @ weights["b"]


def test_only_what_matmuls_read_and_make_is_saved():
    weights = {name: jnp.ones((WIDE, WIDE)) for name in "ab"}
    x, trained = jnp.ones((ROWS, WIDE)), frozenset(weights)
    args = trained, weights, x
    found = fused_bytes(two_matmuls, *args, kept=lambda _: ())
    # x, x @ a, and what is multiplied by b.
    assert found == 3 * ROWS * WIDE * 4
    saved = jax.eval_shape(
        lambda w, x: residuals_of(two_matmuls, trained, w, x), *args[1:]
    )
    assert sum(leaf.size * 4 for leaf in saved) > found


def test_the_compiler_is_free_to_fuse_where_nothing_is_computed_again():
    """A barrier holds what a policy keeps, or the compiler would keep all the rest."""

    def held(remat):
        text = tiny_stack.lower(f"data=1,remat={remat},scan_unroll=4").lowered.as_text()
        lines = [line for line in text.splitlines() if "optimization_barrier" in line]
        return max(line.partition(" : ")[2].count("tensor") for line in lines)

    assert held("none") < held("dots")


def test_values_with_many_ways_to_them_are_looked_at_once():
    """Each round uses the value twice: there are 2^60 ways to the first one."""

    def doubled(weights, x):
        h = x @ weights["a"]
        for _ in range(60):
            h = jnp.sin(h) * h
        return h @ weights["a"]

    weights, x = {"a": jnp.ones((WIDE, WIDE))}, jnp.ones((ROWS, WIDE))
    found = fused_bytes(doubled, frozenset("a"), weights, x, kept=lambda _: ())
    assert found == 3 * ROWS * WIDE * 4
