"""Local SGD against the papers' recurrences, computed in numpy in one process."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny_models, tiny_stack
from support.marks import slow
from support.regression import (
    ADAM,
    MODEL,
    MOMENTUM,
    NESTEROV,
    ROWS,
    SGD,
    STEPS,
    lower,
    reference,
    rows,
    rows_of,
    train,
)
from support.tiny_models import host, relative_error

import meshpar
from meshpar import local_sgd
from meshpar.local_sgd import contract

SWAP = np.eye(4)[[1, 0, 3, 2]]
CASES = {
    "local SGD": (SGD, dict(period=4)),
    "post-local": (MOMENTUM, dict(period=local_sgd.warm_up(4, 5))),
    "DiLoCo": (ADAM, dict(period=5, outer=NESTEROV)),
    "streaming DiLoCo": (
        ADAM,
        dict(
            period=6,
            staleness=3,
            fragments=2,
            outer=NESTEROV,
            merge=local_sgd.Lerp(0.5),
        ),
    ),
    "streaming, int4": (
        SGD,
        dict(
            period=6,
            staleness=2,
            fragments=3,
            outer=NESTEROV,
            merge=local_sgd.Lerp(0.5),
            wire="int4",
        ),
    ),
    "streaming after warm-up": (
        ADAM,
        dict(period=local_sgd.warm_up(3, 4), staleness=2, fragments=2, outer=NESTEROV),
    ),
    "one step late": (
        SGD,
        dict(
            period=3,
            staleness=1,
            outer=NESTEROV,
            damping=1.0,
            merge=local_sgd.Overwrite(),
        ),
    ),
    "shift": (MOMENTUM, dict(period=4, staleness=3)),
    "damping": (SGD, dict(period=4, staleness=2, outer=NESTEROV, damping=1.0)),
    "EASGD": (SGD, dict(period=3, merge=local_sgd.Elastic(0.2))),
    "EASGD, late": (
        MOMENTUM,
        dict(period=4, staleness=2, merge=local_sgd.Elastic(0.1)),
    ),
    "EASGD, int8": (SGD, dict(period=3, merge=local_sgd.Elastic(0.2), wire="int8")),
    "bf16": (SGD, dict(period=2, wire="bf16")),
    "int8": (SGD, dict(period=4, staleness=2, outer=NESTEROV, wire="int8")),
    "int8 without error feedback": (
        SGD,
        dict(period=4, wire="int8", error_feedback=False),
    ),
    "gossip, ring": (SGD, dict(period=2, gossip=local_sgd.Gossip("ring"))),
    "gossip, exponential": (
        SGD,
        dict(period=3, staleness=2, gossip=local_sgd.Gossip("exponential")),
    ),
    "gossip, matrices": (
        SGD,
        dict(period=1, gossip=local_sgd.Gossip([np.eye(4) / 2 + SWAP / 2, np.eye(4)])),
    ),
}

DEFAULT = {
    *("post-local", "streaming, int4", "one step late", "EASGD, late"),
    *("int8 without error feedback", "gossip, exponential", "gossip, matrices"),
}
"""Cases of every rule, among them all that travel; `-m slow` runs all others."""


@pytest.mark.parametrize("name", [n if n in DEFAULT else slow(n) for n in CASES])
def test_equals_the_recurrence(name):
    inner, options = CASES[name]
    mode = meshpar.LocalSGD(**options)
    program = lower("replica=4", inner, mode=mode)
    state, _ = train(program)
    for r, want in enumerate(reference(program, mode, inner)):
        params = {path: np.asarray(x)[r] for path, x in state.params.items()}
        # A number between two bfloat16 values may be rounded either way.
        tolerance = 1e-4 if mode.wire == "bf16" else 2e-5
        assert relative_error(params, host(want)) < tolerance, f"replica {r}"
    assert program.violations() == []


@pytest.mark.parametrize(
    "inner",
    [slow(SGD), MOMENTUM, slow(optax.sgd(0.05, 0.9, nesterov=True))],
    ids=["sgd", "momentum", "nesterov"],
)
def test_period_1_is_synchronous_training(inner):
    local = train(lower("replica=2,fsdp=2", inner, mode=meshpar.LocalSGD(1)))[0]
    synchronous = train(lower("data=2", inner))[0]
    average = {path: x.mean(0) for path, x in host(local.params).items()}
    assert relative_error(average, host(synchronous.params)) < 1e-6


def test_period_1_with_adam_is_not_synchronous_training():
    local = train(lower("replica=2", ADAM, mode=meshpar.LocalSGD(1)))[0]
    synchronous = train(lower("data=2", ADAM))[0]
    average = {path: x.mean(0) for path, x in host(local.params).items()}
    assert relative_error(average, host(synchronous.params)) > 1e-3


INSIDE = optax.sgd(0.1, 0.9)
EQUAL_ROWS = {"weight": np.ones(tiny_stack.BATCH, np.float32)}
"""Replicas count alike, whatever their rows weigh."""


def of_model(name):
    """A function that lowers, and two batches."""
    if name == "stack":
        return tiny_stack.lower, [tiny_stack.batch(i) | EQUAL_ROWS for i in range(2)]
    return tiny_models.lower, [tiny_models.batch(i) for i in range(2)]


@functools.cache
def one_device(name):
    """Weights after two steps, and the loss of the last batch then."""
    lower_model, batches = of_model(name)
    single = lower_model("data=1", optimizer=INSIDE)
    state = single.init(0)
    for batch in batches:
        state, _ = single.step(state, batch)
    return host(state.params), float(single.evaluate(state, batches[-1])["loss"])


@pytest.mark.parametrize(
    "name, layout, lowering",
    [
        ("stack", "replica=2,fsdp=2,tensor=2", "shard_map"),
        slow("stack", "replica=2,pipe=2,fsdp=2,microbatches=2", "shard_map"),
        slow("decoder", "replica=2,fsdp=2,tensor=2", "shard_map"),
        slow("decoder", "replica=2,fsdp=2,context=2", "shard_map"),
        slow("decoder", "replica=2,pipe=2,fsdp=2,microbatches=2", "shard_map"),
        slow("decoder", "replica=2,data=2,fsdp=2,zero=2,microbatches=2", "jit"),
    ],
)
def test_any_layout_inside_a_replica(name, layout, lowering):
    mode = meshpar.LocalSGD(1, wire="f32")
    lower_model, batches = of_model(name)
    program = lower_model(layout, optimizer=INSIDE, mode=mode, lowering=lowering)
    state, (want, loss) = program.init(0), one_device(name)
    for batch in batches:
        state, _ = program.step(state, batch)
    assert relative_error(host(program.weights(state)), want) < 1e-6
    evaluated = program.evaluate(state, batches[-1])
    assert float(evaluated["drift"]) < 1e-7
    assert float(evaluated["loss"]) == pytest.approx(loss, rel=1e-5)
    assert program.violations() == []
    declared, collectives = contract.synchronization(program.programs)
    assert declared.violations(collectives) == [] and collectives


def with_noise_for_the_other(r, seed):
    """Replica r's rows of a batch, and constants in the rows of the other replica."""
    own = rows_of(r, 2, rows(seed))
    noise = jax.tree.map(lambda x: np.full_like(x, 7 + r), own)
    parts = (own, noise) if r == 0 else (noise, own)
    return jax.tree.map(lambda *x: np.concatenate(x), *parts)


@pytest.mark.slow
def test_a_longer_period_than_the_run_is_independent_runs():
    """No rows of one replica influence the other, bit for bit."""
    mode = meshpar.LocalSGD(STEPS + 1)
    state, metrics = train(lower("replica=2", ADAM, mode=mode))
    half = jax.tree.map(lambda x: x[: ROWS // 2], rows(1))
    for r in range(2):
        program = lower("replica=2", ADAM, mode=mode)
        single = meshpar.lower(MODEL, ADAM, "data=1", half, devices=jax.devices()[:1])
        noisy, alone = program.init(0), single.init(0)
        for step in range(1, STEPS + 1):
            noisy, _ = program.step(noisy, with_noise_for_the_other(r, step))
            alone, _ = single.step(alone, rows_of(r, 2, rows(step)))
        replica = {path: x[r] for path, x in host(state.params).items()}
        for path, x in replica.items():
            assert (x == np.asarray(noisy.params[path])[r]).all(), path
        # Another program, whose kernels may add up in another order.
        assert relative_error(replica, host(alone.params)) < 1e-6
    assert all(m["replica_bytes"] == 0 for m in metrics)


def test_the_exponential_graph_averages_exactly():
    mode = meshpar.LocalSGD(1, gossip=local_sgd.Gossip("exponential"))
    program = lower("replica=8", optax.sgd(0.0), mode=mode)
    state = program.init(0)
    rngs = np.random.default_rng(0)
    before = {p: rngs.normal(size=x.shape) for p, x in state.params.items()}
    state = state._replace(
        params={
            p: jax.device_put(jnp.asarray(x, jnp.float32), state.params[p].sharding)
            for p, x in before.items()
        }
    )
    for step in range(3):
        state, _ = program.step(state, rows(step))
    for path, x in host(state.params).items():
        average = np.tile(before[path].mean(0), (8, *[1] * (x.ndim - 1)))
        np.testing.assert_allclose(x, average, atol=1e-6)
