"""Trials in one program: each equals a run of its own, and nothing moves across."""

import jax
import numpy as np
import optax
import pytest
from support import tiny_stack

import meshpar
from meshpar.errors import MeshparError
from meshpar.methods.random_search import trials

STEPS = 3


def optimizer(values):
    return optax.adamw(values["rate"], weight_decay=values["decay"], eps=1e-2)


@pytest.fixture(scope="module")
def searched():
    """Sixteen trials on eight devices, after some steps."""
    values = trials.grid(rate=np.geomspace(1e-3, 1e-1, 8), decay=[0.0, 0.1])
    found = trials.Trials(tiny_stack.model(), optimizer, values, tiny_stack.batch())
    state, losses = found.init(seed=5), []
    for step in range(STEPS):
        state, loss = found.step(state, tiny_stack.batch(step))
        losses.append(np.asarray(loss))
    return found, state, np.array(losses)


def alone(values):
    """Weights and losses of one run of its own on one device."""
    program = meshpar.lower(
        tiny_stack.model(),
        optimizer(values),
        "data=1",
        tiny_stack.batch(),
        devices=jax.devices()[:1],
    )
    state, losses = program.init(5), []
    for step in range(STEPS):
        state, metrics = program.step(state, tiny_stack.batch(step))
        losses.append(float(metrics["loss"]))
    return state.params, losses


@pytest.mark.parametrize("trial", [0, 11])
def test_every_trial_equals_a_run_of_its_own(searched, trial):
    found, state, losses = searched
    params, wanted = alone({k: float(x[trial]) for k, x in found.values.items()})
    np.testing.assert_allclose(losses[:, trial], wanted, rtol=1e-5)
    for path, x in params.items():
        np.testing.assert_allclose(state.params[path][trial], x, rtol=0, atol=1e-6)
    other = np.abs(np.asarray(state.params["head"][trial ^ 4]) - params["head"])
    assert other.max() > 1e-5  # Trials differ.


def test_nothing_moves_between_trials(searched):
    found, state, _ = searched
    assert found.collectives == [] == found.violations()
    assert state.params["head"].sharding.spec == jax.P("trial")
    assert found.num_trials == 16 and found.mesh.size == 8


def test_a_collective_across_trials_is_found():
    def leaking(values):
        shared = lambda g: jax.lax.pmean(g, trials.TRIAL)  # noqa: E731
        share = optax.stateless(lambda grads, _: jax.tree.map(shared, grads))
        return optax.chain(share, optax.sgd(values["rate"]))

    found = trials.Trials(
        tiny_stack.model(), leaking, {"rate": np.ones(8)}, tiny_stack.batch()
    )
    assert "all_reduce over trial: trials share nothing" in found.violations()


def test_grid_and_random_values():
    assert trials.grid(a=[1, 2], b=[3, 4, 5])["b"].tolist() == [3, 4, 5] * 2
    drawn = trials.random(1000, seed=1, rate=(1e-4, 1.0), decay=(2.0, 2.0))
    assert set(drawn["decay"].round(9)) == {2.0}
    assert drawn["rate"].min() >= 1e-4 and drawn["rate"].max() <= 1
    assert np.mean(drawn["rate"] < 1e-2) == pytest.approx(0.5, abs=0.05)
    with pytest.raises(MeshparError, match="use 0 < smallest <= largest"):
        trials.random(3, rate=(0, 1))


@pytest.mark.parametrize(
    "values, message",
    [
        ({"rate": np.ones(6), "decay": np.ones(6)}, "6 trials on 8 devices"),
        ({"rate": np.ones(8), "decay": np.ones(4)}, "give as many values of each"),
    ],
)
def test_values_that_cannot_be(values, message):
    with pytest.raises(MeshparError, match=message):
        trials.Trials(tiny_stack.model(), optimizer, values, tiny_stack.batch())
