"""Programs of steps compute what their function computes, or any part of it."""

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.jaxprs.straight_line import StraightLine, dependents, value_numbers

X = np.linspace(0.1, 0.9, 6).reshape(2, 3).astype(np.float32)
TABLE = np.arange(6.0).reshape(2, 3).astype(np.float32)


def straight(fn, *args, inlined=True):
    return StraightLine.of(jax.make_jaxpr(fn)(*args), lambda _: inlined)


@jax.jit
def shifted(x):
    return jnp.tanh(x) + TABLE


def test_calls_written_out_or_not_compute_the_same():
    def fn(x, scale):
        return shifted(shifted(x) * scale).sum(), shifted(x)

    for inlined in (True, False):
        program = straight(fn, X, 2.0, inlined=inlined)
        names = {step.eqn.primitive.name for step in program.steps}
        assert bool(names & {"jit", "pjit"}) != inlined
        known = dict(zip(program.inputs, (X, jnp.float32(2.0)), strict=True))
        found = program.evaluate(program.outputs, known)
        for own, want in zip(found, fn(X, 2.0), strict=True):
            np.testing.assert_allclose(own, want, rtol=1e-6)


def test_a_part_runs_from_what_is_known():
    program = straight(lambda x: jnp.exp(jnp.sin(x)).sum(), X)
    sine = next(s for s in program.steps if s.eqn.primitive.name == "sin")
    rest = program.needed(program.outputs, sine.results)
    assert sine not in rest
    (found,) = program.evaluate(program.outputs, {sine.results[0]: jnp.zeros_like(X)})
    assert found == X.size


def test_steps_that_nothing_needs_do_not_run():
    def fn(x):
        return jnp.sin(x), jnp.cos(x)

    program = straight(fn, X)
    (step,) = program.needed(program.outputs[1:])
    assert step.eqn.primitive.name == "cos"


def test_dependents():
    program = straight(lambda x, y: (x + 1, x * y, y - 1), X, X)
    reached = dependents(program.steps, program.inputs[:1])
    assert [slot in reached for slot in program.outputs] == [True, True, False]


def test_equal_numbers_are_computed_in_the_same_way():
    other = TABLE + 1

    def fn(x):
        first, second = jnp.arange(3) * 2, jnp.arange(3) * 2
        tables = shifted(x), jax.jit(lambda x: jnp.tanh(x) + other)(x)
        return first, second, jnp.arange(3) * 3, *tables, shifted(x)

    for inlined in (True, False):
        program = straight(fn, X, inlined=inlined)
        number = value_numbers(program.steps)
        first, second, third, shifts, others, again = map(number, program.outputs)
        assert first == second != third
        assert shifts != others
        assert (shifts == again) != inlined  # Constants stand for themselves.


def test_numbers_of_known_slots():
    program = straight(lambda x, y: (jnp.sin(x), jnp.sin(y)), X, X)
    number = value_numbers(program.steps, dict.fromkeys(program.inputs, "same"))
    assert len(set(map(number, program.outputs))) == 1
