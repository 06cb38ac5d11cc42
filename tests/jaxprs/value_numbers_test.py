"""Value numbers: values that are computed in the same way have equal numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshpar.jaxprs.value_numbers import ValueNumbers

X = jnp.linspace(0.1, 0.9, 6).reshape(2, 3)
ONE, SAME, OTHER = (np.full((2, 3), x, np.float32) for x in (1, 1, 2))


def numbers_of(fn, *args):
    """The numbers of fn's results; arguments equal nothing else."""
    numbers, closed = ValueNumbers(), jax.make_jaxpr(fn)(*args)
    return numbers.evaluate(closed, [numbers.new() for _ in closed.jaxpr.invars])


def loop(step, rounds=3):
    """A function that runs a loop whose body is traced anew in each call."""
    return lambda x: lax.scan(lambda c, _: (step(c), None), x, None, rounds)[0]


def test_calls_and_copies_have_the_values_of_their_bodies():
    @jax.jit
    def shifted(x):
        return jnp.tanh(x) + 1

    def fn(x):
        return shifted(x), jnp.tanh(x) + 1, jnp.copy(jnp.tanh(x) + 1), jnp.tanh(x) + 2

    called, plain, copied, other = numbers_of(fn, X)
    assert called == plain == copied != other


EQUAL_LOOPS = {
    "the same body, traced twice": (loop(jnp.sin), loop(jnp.sin), True),
    "a call in one of them": (loop(jnp.sin), loop(jax.jit(jnp.sin)), True),
    "equal constants": (loop(lambda x: x + ONE), loop(lambda x: x + SAME), True),
    "another constant": (loop(lambda x: x + ONE), loop(lambda x: x + OTHER), False),
    "another body": (loop(jnp.sin), loop(jnp.cos), False),
    "another literal": (loop(lambda x: x * 2), loop(lambda x: x * 3), False),
    "another length": (loop(jnp.sin), loop(jnp.sin, 4), False),
    "operands in another order": (
        lambda x: lax.cond(True, lambda a, b: a - b, lambda a, b: a, x, 2 * x),
        lambda x: lax.cond(True, lambda a, b: b - a, lambda a, b: a, x, 2 * x),
        False,
    ),
}


@pytest.mark.parametrize("one, other, equal", EQUAL_LOOPS.values(), ids=EQUAL_LOOPS)
def test_equations_that_run_jaxprs_are_equal_if_these_are(one, other, equal):
    first, second = numbers_of(lambda x: (one(x), other(x)), X)
    assert (first == second) == equal


def test_literals_of_other_dtypes_differ():
    def fn(x):
        wide, narrow = x.astype(jnp.float32), x.astype(jnp.bfloat16)
        return jnp.full_like(wide, 2), jnp.full_like(narrow, 2), jnp.full_like(wide, 2)

    wide, narrow, again = numbers_of(fn, X)
    assert wide == again != narrow


def test_an_index_along_a_dim_that_is_read_whole_makes_no_difference():
    def fn(x, i, j):
        sizes = (1, 3)
        return [lax.dynamic_slice(x, at, sizes) for at in ((i, i), (i, j), (j, i))]

    first, second, third = numbers_of(fn, X, 0, 1)
    assert first == second != third


def test_results_of_side_effects_equal_nothing():
    def fn(x):
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        calls = [jax.experimental.io_callback(np.sin, result, x) for _ in range(2)]
        return *calls, jnp.sin(x), jnp.sin(x)

    first, second, pure, again = numbers_of(fn, X)
    assert first != second and pure == again
