"""Results that are arguments, handed through calls and loops."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshpar.jaxprs.passed_through import passed_through

X, Y = jnp.ones(3), jnp.zeros(3)


def scanned(body):
    return lambda x, y: lax.scan(body, (x, y), None, 3)[0]


FUNCTIONS = {
    "arguments": (lambda x, y: (y, x), [1, 0]),
    "computed": (lambda x, y: (x + 0 * y, y), [None, 1]),
    "a literal": (lambda x, y: (x, 1.0), [0, None]),
    "a call": (lambda x, y: jax.jit(lambda a, b: (b, a * 2))(x, y), [1, None]),
    "rematerialized": (
        lambda x, y: jax.checkpoint(lambda a, b: (b, jnp.sin(a)))(x, y),
        [1, None],
    ),
    "a scan's carry": (scanned(lambda c, _: ((c[0], c[1] + 1), None)), [0, None]),
    "carries that change places": (scanned(lambda c, _: (c[::-1], None)), [None] * 2),
    "a scan's stack": (
        lambda x, y: lax.scan(lambda c, row: (c, row), x, y[None])[:2],
        [0, None],
    ),
    "a while loop": (
        lambda x, y: lax.while_loop(
            lambda c: c[0].sum() < 9, lambda c: (c[0] + 1, c[1]), (x, y)
        ),
        [None, 1],
    ),
}


@pytest.mark.parametrize("fn, want", FUNCTIONS.values(), ids=FUNCTIONS)
def test_arguments_that_are_handed_through(fn, want):
    assert passed_through(jax.make_jaxpr(fn)(X, Y).jaxpr) == want
