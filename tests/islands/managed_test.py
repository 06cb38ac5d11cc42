"""Managed communication: budgets, orders, and lazy reads, against plain references."""

import dataclasses

import jax
import numpy as np
import pytest
from support import island_reference
from support.island_reference import BASE, batch, given, gradient

from meshpar.errors import MeshparError
from meshpar.islands import SSP, Islands, Payload, split, updates
from meshpar.islands.managed import KEY_BYTES, ORDERS, ManagedPushes
from meshpar.islands.rules import Rules
from meshpar.islands.simulated_worker import SimulatedWorker
from meshpar.islands.simulator import Simulator

SIZE, COUNT = 50, 6


def pushes(order, turns=30):
    """[(updates that waited, values, keys, numbers)] of one worker."""
    draws, found = np.random.default_rng(3), []
    managed = ManagedPushes(SIZE, COUNT * KEY_BYTES, order, seed=1)
    waiting = np.zeros(SIZE)
    for _ in range(turns):
        update = draws.normal(size=SIZE).astype(np.float32)
        values = draws.normal(size=SIZE).astype(np.float32)
        waiting += update
        keys, numbers = managed.take(update, values)
        found.append((waiting.copy(), values, keys, numbers))
        waiting[keys] = 0
        np.testing.assert_allclose(managed.unsent_N, waiting, rtol=0, atol=1e-5)
    return found


@pytest.mark.parametrize("order", ORDERS)
def test_a_push_keeps_to_its_budget_and_no_update_is_lost(order):
    for waiting, _, keys, numbers in pushes(order):
        assert len(keys) == COUNT and list(keys) == sorted(set(keys))
        np.testing.assert_allclose(numbers, waiting[keys], rtol=0, atol=1e-5)


@pytest.mark.parametrize("order", ["magnitude", "relative"])
def test_the_most_important_updates_go_first(order):
    for waiting, values, keys, _ in pushes(order):
        importance = abs(waiting)
        if order == "relative":
            importance = importance / np.maximum(abs(values), 1e-3)
        wanted = np.argsort(-importance)[:COUNT]
        assert set(wanted) == set(keys)


def test_orders_that_look_at_no_update():
    turns = [keys for _, _, keys, _ in pushes("round_robin", turns=25)]
    counts = np.bincount(np.concatenate(turns), minlength=SIZE)
    assert counts.tolist() == [3] * SIZE
    drawn = np.concatenate([keys for _, _, keys, _ in pushes("random", turns=100)])
    assert 1 <= np.bincount(drawn, minlength=SIZE).min()


def test_a_budget_for_all_numbers_sends_them_as_they_are():
    managed, update = ManagedPushes(4, 16), np.arange(4, dtype=np.float32)
    keys, numbers = managed.take(update, update)
    assert keys is None
    np.testing.assert_array_equal(numbers, update)


def recurrence(steps, rate):
    """SGD that sends the 5 largest of 16 sums of gradients, in float64."""
    w, unsent = given()["own"].astype(float), np.zeros(16)
    for step in range(steps):
        unsent += gradient(w, batch(step))[0].ravel()
        keys = np.argsort(-abs(unsent))[:5]
        change = np.zeros(16)
        change[keys], unsent[keys] = unsent[keys], 0
        w = w - rate * change.reshape(4, 4)
    return w


def test_an_island_with_a_budget_equals_its_recurrence_and_resumes():
    mode = dataclasses.replace(BASE, budget=5 * KEY_BYTES, momentum=0.0)
    program = island_reference.lower(0.0, mode)
    state = program.init(0, given())
    for step in range(8):
        if step == 4:
            portable, extra = program.in_model_order(state), program.extra_state(state)
            program.close()
            program = dataclasses.replace(program, _running=type(program._running)())
            state = program.as_stored(portable, extra)
        state, metrics = program.step(state, batch(step))
        assert metrics.get("pushed_bytes", 0) in (0, 5 * KEY_BYTES)
    found = jax.device_get(program.in_model_order(state).params["own"])
    program.close()
    # The last push waits until the island is asked for its next batch.
    wanted = [recurrence(steps, mode.learning_rate) for steps in (7, 8)]
    errors = [np.abs(found - w).max() for w in wanted]
    assert min(errors) < 1e-6 and np.abs(wanted[0] - wanted[1]).max() > 1e-3


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(budget=4), "budget=4: a number and its key take 8 bytes"),
        (dict(budget=64, algorithm="compensated"), "use downpour or damped"),
        (dict(budget=64, wire="int8"), "wire=f32"),
        (dict(order="largest"), "order='largest'"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(MeshparError, match=message):
        Islands(**settings)


@pytest.mark.parametrize("lazy", [None, 1])
def test_lazy_reads_keep_the_bound_and_save_pulls(lazy):
    staleness, parts = 3, split("w", 4, 1)
    simulator = Simulator(
        [parts[0].range], Rules(SSP(staleness), updates.sgd(0.1)), seed=2
    )
    simulator.start("ab")
    task = lambda worker, clock, read: {  # noqa: E731
        "w/0": Payload((None, np.ones(4, np.float32)))
    }
    speed = {"a": 1.0, "b": 1.3}
    workers = [
        SimulatedWorker(
            simulator, n, 20, task, lambda n, _: speed[n], joined=True, lazy=lazy
        )
        for n in "ab"
    ]
    simulator.run(lambda: all(worker.done for worker in workers))
    pulls = {}
    for worker in workers:
        ages = [c - min(r.slowest for r in read.values()) for c, read in worker.reads]
        assert len(ages) == 20 and max(ages) <= staleness
        pulls[worker.name] = len({id(read) for _, read in worker.reads})
    # The slower worker reads every second time, and the faster one does not read once,
    # before it is ahead.
    assert pulls == ({"a": 20, "b": 20} if lazy is None else {"a": 19, "b": 10})
