"""Replication after aggregation: one average travels down a chain for many pushes."""

import pickle

import numpy as np
import pytest
from support.marks import first
from support.store_schedules import Schedule, counted

from meshpar.errors import MeshparError
from meshpar.islands import ASP, BSP, SSP, Payload, RefusedError, Store, split, updates
from meshpar.islands.messages import (
    Done,
    Forward,
    Push,
    Send,
)
from meshpar.islands.node import Node
from meshpar.islands.range_state import RangeState
from meshpar.islands.wire import PushEncoder, decoders

WORKERS, CLOCKS, SIZE = "abcd", 3, 500
RANGES = [part.range for part in split("w", 2 * SIZE, 2)]


def made(aggregate, consistency=BSP, **settings):
    settings = dict(servers=3, replicas=3, aggregate=aggregate) | settings
    update = settings.pop("update", updates.sgd(0.1, momentum=0.9))
    store = Store(RANGES, consistency(), update, **settings)
    for worker in WORKERS:
        store.join(worker, 0)
    return store


def numbers(worker, clock):
    draws = np.random.default_rng([ord(worker), clock])
    return draws.normal(size=SIZE).astype(np.float32)


def payload(kind, worker, clock, encoders):
    """A push of one kind, with a weight; every fifth one has nothing to say."""
    facts = dict(weight=1.0 + ord(worker) % 3, version=clock)
    if (ord(worker) + clock) % 5 == 0:
        return None
    values = numbers(worker, clock)
    if kind == "dense":
        return Payload((None, values), **facts)
    if kind == "sparse":
        keys = np.flatnonzero(values > 0.5).astype(np.int32)
        return Payload((keys, values[keys]), **facts)
    encoder = encoders.setdefault(worker, PushEncoder(kind))
    return encoder.encode("w", values, clock, values, **facts)


def train(store, kind, check=lambda clock: None):
    """All workers push to all ranges, in another order in every round."""
    encoders = {}
    for clock in range(CLOCKS):
        pushes = {w: payload(kind, w, clock, encoders) for w in WORKERS}
        for worker in np.random.default_rng(clock).permutation(list(WORKERS)):
            for key_range in RANGES:
                store.push(key_range.name, str(worker), clock, pushes[worker])
        check(clock)
    return store


@pytest.mark.parametrize("kind", ["dense", "sparse", "int8"])
def test_all_replicas_have_the_bits_of_a_store_without_aggregates(kind):
    update, known = updates.staleness_damped(updates.adagrad(0.1)), decoders("int8")
    settings = dict(update=update, decoders=known, history=1)
    one, other = (train(made(x, **settings), kind) for x in (True, False))
    for key_range in RANGES:
        wanted = other.state(key_range.name).snapshot()
        assert int(np.count_nonzero(wanted["values"])) > SIZE // 4
        for server in one.chains[key_range.name]:
            got = one._servers._nodes[server].state(key_range.name).snapshot()
            assert got.keys() == wanted.keys()
            for name in wanted:
                np.testing.assert_array_equal(got[name], wanted[name], err_msg=name)


def test_rounds_are_the_means_of_a_plain_loop():
    store = train(made(True, update=updates.sgd(0.1)), "dense")
    w = np.zeros(SIZE)
    for clock in range(CLOCKS):
        pushed = {n: payload("dense", n, clock, {}) for n in WORKERS}
        said = [p for p in pushed.values() if p is not None]
        total = sum(p.weight for p in said)
        w -= 0.1 * sum(p.weight * p.data[1].astype(float) for p in said) / total
    for key_range in RANGES:
        values = store.pull(key_range.name, "a", CLOCKS).values
        np.testing.assert_allclose(values, w, rtol=0, atol=1e-6)


def forwarded_bytes(monkeypatch, aggregate):
    """Bytes of the pickled operations that servers send to each other in training."""
    store, found, handle = made(aggregate), [], Node.handle

    def counted(self, message):
        if isinstance(message, Forward):
            found.append(len(pickle.dumps(message)))
        return handle(self, message)

    with monkeypatch.context() as patch:
        patch.setattr(Node, "handle", counted)
        train(store, "dense")
    return found


def test_bytes_between_replicas_fall_by_the_number_of_workers(monkeypatch):
    silent = sum((ord(w) + c) % 5 == 0 for w in WORKERS for c in range(CLOCKS))
    pushes = len(WORKERS) * CLOCKS - silent
    one, other = (forwarded_bytes(monkeypatch, x) for x in (True, False))
    links = 2 * len(RANGES)
    assert len(one) == CLOCKS * links and len(other) == len(WORKERS) * CLOCKS * links
    # A push without payload has a few bytes of names, and so has every message.
    assert 0.9 * pushes / CLOCKS < sum(other) / sum(one) < 1.1 * pushes / CLOCKS


def test_a_push_is_answered_with_its_round_alone_and_once_all_replicas_have_it():
    store, name = made(True), RANGES[0].name
    for worker in "abc":
        store.push(name, worker, 0, numbers(worker, 0))
        store.push(name, worker, 0, numbers(worker, 0))  # It repeats itself.
        assert store.clocks(name) == dict.fromkeys(WORKERS, 0)
        assert store.pull(name, worker, 1) is None
    head = store.chains[name][0]
    store.remove_server(head, dead=True)  # What it had gathered is sent again.
    store.push(name, "d", 0, numbers("d", 0))
    assert store.clocks(name) == dict.fromkeys(WORKERS, 1)
    mean = sum(numbers(w, 0) * np.float32(0.25) for w in WORKERS)
    np.testing.assert_array_equal(store.pull(name).values, -np.float32(0.1) * mean)
    store.push(name, "a", 0, numbers("a", 0))
    assert store.state(name).version == 1 and store.clocks(name)["a"] == 1


def test_a_worker_that_leaves_lets_the_round_close_with_what_it_had_pushed():
    store, name = made(True), RANGES[0].name
    for worker in "ab":
        store.push(name, worker, 0, np.float32([1.0] * SIZE))
    store.leave("a")
    store.leave("c")
    assert store.state(name).version == 0
    store.leave("d")
    assert store.state(name).version == 1 and store.clocks(name) == {"b": 1}
    np.testing.assert_array_equal(store.pull(name).values, np.float32([-0.1] * SIZE))


def test_quorums_close_rounds_after_their_grace():
    store, name = made(True, quorum=2, grace=1.0), RANGES[0].name
    store.push(name, "a", 0, numbers("a", 0))
    assert store.take_quorums() == []
    store.push(name, "b", 0, numbers("b", 0))
    (quorum,) = store.take_quorums()
    store.push(name, "c", 0, numbers("c", 0))
    assert store.take_quorums() == [] and store.state(name).version == 0
    store.close(quorum)
    store.close(quorum)
    assert store.state(name).version == 1
    assert store.clocks(name) == {"a": 1, "b": 1, "c": 1, "d": 0}


# Laws, on the seeded schedules of the store.

FAULTS = ((), ("server",), ("worker",), ("join", "late"), ("server", "worker", "late"))


def schedule(seed, faults=None, **settings):
    faults = FAULTS[seed % len(FAULTS)] if faults is None else faults
    settings = dict(update=counted, aggregate=True) | settings
    return Schedule(seed, BSP(), faults, **settings)


@pytest.mark.parametrize("part", first(1, range(8)))
def test_the_laws_hold_on_random_schedules(part):
    for seed in range(part, 600, 8):
        schedule(seed).start().run_and_check()


def test_no_acknowledged_push_is_lost_or_doubled_when_a_server_dies_at_any_event():
    def at(event=None):
        return schedule(7, (), at=event).start(names=("a", "b"))

    events = at().run().simulator.events
    assert events > 150
    for event in range(0, events, 3):
        at(event).run().check_end()


def test_quorums_keep_what_they_acknowledge():
    for seed in range(20):
        faults = ("server", "late") if seed % 2 else ("worker",)
        run = schedule(seed, faults, quorum=2, grace=0.5).start().run()
        run.check_replicas()


def answered_when_gathered(monkeypatch):
    request = Node._request

    def at_once(self, message):
        sends = request(self, message)
        if isinstance(message.operation, Push) and self.waits(message):
            sends.append(Send(message.client, Done(message.request)))
        return sends

    monkeypatch.setattr(Node, "_request", at_once)


def without_ids(monkeypatch):
    duplicate = RangeState.duplicate

    def forgets(self, operation):
        return not isinstance(operation, Push) and duplicate(self, operation)

    monkeypatch.setattr(RangeState, "duplicate", forgets)


@pytest.mark.parametrize(
    "mutate, law",
    [
        (answered_when_gathered, "an update is lost"),
        (without_ids, "applied twice"),
    ],
)
def test_a_broken_protocol_is_caught(monkeypatch, mutate, law):
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=law):
        for seed in range(200):
            schedule(seed).start().run_and_check()


# What is refused.


@pytest.mark.parametrize("consistency", [ASP, lambda: SSP(1)])
def test_stores_without_rounds_have_nothing_to_aggregate(consistency):
    with pytest.raises(MeshparError, match=r"aggregate=True with .*; use BSP\(\)"):
        made(True, consistency)


def test_decoders_that_remember_are_refused():
    def remembers(data, size, cache):
        cache["last"] = data
        return None, data

    store = made(True, decoders={"own": remembers})
    push = Payload(numbers("a", 0), encoding="own")
    with pytest.raises(MeshparError, match="keeps arrays .* use aggregate=False"):
        store.push(RANGES[0].name, "a", 0, push)


def test_open_rounds_of_other_stores_are_refused():
    open_round, name = made(False), RANGES[0].name
    open_round.push(name, "a", 0, numbers("a", 0))
    with pytest.raises(MeshparError, match="1 answered pushes of an open round"):
        made(True).restore(open_round.snapshot())


def test_a_snapshot_holds_no_push_that_is_not_answered():
    store, name = made(True), RANGES[0].name
    store.push(name, "a", 0, numbers("a", 0))
    for aggregate in (True, False):
        other = made(aggregate)
        other.restore(store.snapshot())
        for worker in WORKERS:
            other.push(name, worker, 0, np.float32([1] * SIZE))
        np.testing.assert_array_equal(
            other.pull(name).values, np.float32([-0.1] * SIZE)
        )


@pytest.mark.parametrize("aggregate", [True, False])
def test_a_round_that_mixes_dense_and_sparse_pushes_is_refused_as_it_comes(aggregate):
    store, name = made(aggregate), RANGES[0].name
    store.push(name, "a", 0, numbers("a", 0))
    with pytest.raises(MeshparError, match="mixes dense and sparse"):
        store.push(name, "b", 0, (np.arange(2), np.ones(2, np.float32)))
    for worker in "bcd":  # The refused push has changed nothing.
        store.push(name, worker, 0, numbers(worker, 0))
    assert set(store.clocks(name).values()) == {1}
    heads = [store._servers._nodes[server].state(name) for server in store.chains[name]]
    assert len({state.values.tobytes() for state in heads}) == 1


def test_an_update_that_refuses_a_round_refuses_all_its_pushes():
    def refuses(values, state, pushed):
        raise RefusedError(f"no round {pushed.clock}")

    store, name = made(True, update=refuses), RANGES[0].name
    for worker in "abc":
        store.push(name, worker, 0, numbers(worker, 0))
    with pytest.raises(MeshparError, match="no round 0"):
        store.push(name, "d", 0, numbers("d", 0))
    assert store._servers._open == {} and not any(store.clocks(name).values())
