"""The laws of the store, on seeded schedules of delays, losses and deaths."""

import numpy as np
import optax
import pytest
from support.marks import first
from support.store_schedules import NAMES, RANGES, STEPS, Schedule

from meshpar.islands import ASP, BSP, SSP, BoundedDelay, KeyRange, Payload, updates
from meshpar.islands.messages import Done, Forward, Push, Send
from meshpar.islands.node import Node
from meshpar.islands.optax_update import optax_update
from meshpar.islands.range_state import RangeState

FAULTS = ((), ("server",), ("worker",), ("join", "late"), ("server", "worker", "late"))
MODELS = (SSP(1), SSP(2), ASP(), BoundedDelay(2), BoundedDelay(0))


def law_schedule(seed):
    consistency = MODELS[seed % len(MODELS)]
    return Schedule(seed, consistency, FAULTS[seed // len(MODELS) % len(FAULTS)])


@pytest.mark.parametrize("part", first(1, range(8)))
def test_the_laws_hold_on_a_thousand_schedules(part):
    for seed in range(part, 1000, 8):
        law_schedule(seed).start().run_and_check()


def test_no_acknowledged_update_is_lost_when_a_server_dies_at_any_event():
    def schedule(at=None):
        return Schedule(7, ASP(), at=at).start(names=("a", "b"))

    events = schedule().run().simulator.events
    assert events > 200
    for at in range(0, events, 2):
        schedule(at).run().check_end()


def test_the_same_seed_gives_the_same_trace():
    first, again, other = (law_schedule(seed).start().run() for seed in (24, 24, 49))
    assert first.simulator.trace == again.simulator.trace
    assert first.simulator.trace != other.simulator.trace
    kinds = {kind for _, _, kind in first.simulator.trace}
    assert {"Request", "Forward", "Acked", "Install", "Moved"} <= kinds


def test_a_worker_that_comes_late_begins_at_the_clock_of_the_slowest():
    run = Schedule(2, ASP()).start()
    simulator, ranges = run.simulator, [r.name for r in RANGES]

    def ends():
        clocks = [simulator.states(name)[-1].clocks.values() for name in ranges]
        return max(map(min, clocks)), max(map(max, clocks))

    simulator.run(lambda: ends()[1] - ends()[0] >= 2)
    lowest, _ = ends()
    run.add("late")
    joined = []

    def has_joined():
        joined.extend(s.clocks.get("late") for s in simulator.states("u"))
        return any(clock is not None for clock in joined)

    simulator.run(has_joined)
    highest, fastest = ends()
    assert lowest <= next(c for c in joined if c is not None) <= highest < fastest


# Three mutations of the store, each of which breaks a law.


def loose_gate(monkeypatch):
    allows = SSP.allows
    monkeypatch.setattr(
        SSP, "allows", lambda self, clock, clocks: allows(self, clock - 1, clocks)
    )


def forgotten_ids(monkeypatch):
    duplicate = RangeState.duplicate
    monkeypatch.setattr(
        RangeState,
        "duplicate",
        lambda self, operation: (
            not isinstance(operation, Push) and duplicate(self, operation)
        ),
    )


def early_answers(monkeypatch):
    request = Node._request

    def answer_at_once(self, message):
        sends = request(self, message)
        forwards = any(isinstance(send.message, Forward) for send in sends)
        if forwards and isinstance(message.operation, Push):
            sends.append(Send(message.client, Done(message.request)))
        return sends

    monkeypatch.setattr(Node, "_request", answer_at_once)


@pytest.mark.parametrize(
    ("mutate", "law"),
    [
        (loose_gate, "gap"),
        (forgotten_ids, "applied twice"),
        (early_answers, "an update is lost"),
    ],
)
def test_a_broken_store_is_caught(monkeypatch, mutate, law):
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=law):
        for seed in range(200):
            law_schedule(seed).start().run_and_check()


# Against plain optimizers.


def gradient(worker, clock, values):
    """A gradient that depends on what was read, in a way that rounding shows."""
    draws = np.random.default_rng([NAMES.index(worker), clock])
    return (values * 0.3 + draws.normal(size=len(values))).astype(np.float32)


def gradients(worker, clock, read):
    return {
        name: Payload((None, gradient(worker, clock, values.values)))
        for name, values in read.items()
    }


def synchronous(names, update, size):
    """Values after BSP: the mean gradient of all workers, at one place, in order."""
    values, state = np.zeros(size, np.float32), {}
    for clock in range(STEPS):
        share = np.float32(1 / len(names))
        mean = sum(gradient(name, clock, values) * share for name in names)
        pushed = updates.Contribution("", clock, mean)
        update(values, state, pushed)
    return values


@pytest.mark.parametrize("consistency", [SSP(0), BSP()], ids=repr)
@pytest.mark.parametrize("seed", range(12))
def test_no_staleness_equals_bsp_bit_for_bit(consistency, seed):
    update = updates.sgd(0.1, momentum=0.9)
    faults = ("server",) if seed % 2 else ()
    run = Schedule(seed, consistency, faults, update=update).start(gradients).run()
    expected = synchronous("abc", update, RANGES[0].size)
    for key_range in RANGES:
        for state in run.simulator.states(key_range.name):
            np.testing.assert_array_equal(state.values, expected)


@pytest.mark.parametrize("consistency", [SSP(2), ASP(), BSP()], ids=repr)
def test_one_worker_equals_the_plain_optimizer(consistency):
    ranges, optimizer = [KeyRange("u", 5)], optax.adam(0.1)
    run = Schedule(3, consistency, update=optax_update(optimizer), ranges=ranges)
    run.start(gradients, names=("a",)).run()
    values = np.zeros(5, np.float32)
    state = optimizer.init(values)
    for clock in range(STEPS):
        change, state = optimizer.update(gradient("a", clock, values), state, values)
        values = np.asarray(optax.apply_updates(values, change))
    for replica in run.simulator.states("u"):
        np.testing.assert_allclose(replica.values, values, rtol=1e-6)


def test_a_quorum_goes_on_without_a_worker_that_stops():
    for seed in range(20):
        run = Schedule(seed, BSP(), quorum=2, grace=0.5).start(gradients)
        run.workers["c"].kill()  # And nobody notices.
        run.simulator.operate = lambda operation, send=run.simulator.operate: (
            None if type(operation).__name__ == "Leave" else send(operation)
        )
        run.run(lambda run=run: all(run.workers[n].done for n in "ab"))
        assert {len(run.workers[n].acked) for n in "ab"} == {STEPS}


def test_without_a_quorum_the_others_wait_until_the_dead_worker_is_removed():
    run = Schedule(1, BSP()).start(gradients)
    run.workers["c"].kill()
    run.run()
    assert all(run.workers[name].clock == STEPS for name in "ab")
