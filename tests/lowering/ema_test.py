"""The average of the weights equals that of a plain loop, under any layout."""

import numpy as np
import optax
import pytest
from support.biased_model import lower, rows, train, train_plainly
from support.marks import slow
from support.tiny_models import host, relative_error

import meshpar
from meshpar.errors import MeshparError

DECAY, STEPS = 0.8, 4
ADAM = optax.adam(1e-2)
AVERAGED = meshpar.with_ema(ADAM, DECAY)


@pytest.mark.parametrize("layout", ["fsdp=8", slow("pipe=2,fsdp=2,microbatches=2")])
def test_equals_a_plain_loop(layout):
    program = lower(layout, AVERAGED)
    start = program.in_model_order(program.init(0)).params
    want = host(start)
    for weights in train_plainly(ADAM, start, STEPS):
        for path, x in weights.items():
            want[path] = DECAY * want[path] + (1 - DECAY) * x
    state = train(program, STEPS)
    found = host(program.ema_weights(program.in_model_order(state)))
    assert relative_error(found, want) < 1e-6
    assert relative_error(host(program.in_model_order(state).params), want) > 1e-3
    average = program.ema_weights(state)
    loss = float(program.evaluate_params(average, rows())["loss"])
    one = lower("data=1", ADAM)
    assert loss == pytest.approx(
        float(one.evaluate_params(want, rows())["loss"]), rel=1e-5
    )
    assert program.violations() == []


def test_the_average_is_sharded_as_the_weights():
    program = lower("fsdp=8", AVERAGED)
    state = program.init(0)
    for path, x in state.optimizer_state.ema.items():
        assert x.sharding == state.params[path].sharding
    for path, x in program.ema_weights(state).items():
        np.testing.assert_array_equal(x, state.params[path], err_msg=path)


@pytest.mark.slow
def test_stages_of_pipedream_average_their_own_weights():
    program = lower(
        "pipe=3,microbatches=4,schedule=pipedream", meshpar.with_ema(ADAM, 0.0)
    )
    state = train(program, 1)
    for path, x in program.ema_weights(state).items():
        np.testing.assert_array_equal(x, state.params[path], err_msg=path)


def test_replicas_are_averaged():
    program = lower(
        "replica=2",
        meshpar.with_ema(ADAM, 0.0),
        mode=meshpar.LocalSGD(period=2),
        lowering="jit",
    )
    state = train(program, 1)
    average = program.ema_weights(state)
    for path, x in program.weights(state).items():
        np.testing.assert_array_equal(average[path], x, err_msg=path)


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_that_is_none_is_refused(decay):
    with pytest.raises(MeshparError, match=rf"decay={decay}"):
        meshpar.with_ema(ADAM, decay)


def test_an_optimizer_without_an_average_is_an_error():
    program = lower("data=1", ADAM)
    with pytest.raises(MeshparError, match="keeps no average.*with_ema"):
        program.ema_weights(program.abstract_state)
