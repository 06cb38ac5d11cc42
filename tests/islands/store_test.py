"""The store as a library: its API, its updates and its errors."""

import numpy as np
import optax
import pytest

from meshpar.errors import MeshparError
from meshpar.islands import ASP, BSP, SSP, KeyRange, Payload, Store, split, updates
from meshpar.islands.consistency import parse_consistency
from meshpar.islands.coordinator import RangeLostError
from meshpar.islands.hash_ring import chains
from meshpar.islands.optax_update import as_update
from meshpar.islands.wire import PushEncoder, decoders


def gradients(steps=3, size=6):
    return np.random.default_rng(0).normal(size=(steps, size)).astype(np.float32)


PAIRS = {
    "sgd": (updates.sgd(0.1), optax.sgd(0.1)),
    "momentum": (updates.sgd(0.1, 0.9), optax.sgd(0.1, 0.9)),
    "nesterov": (updates.sgd(0.1, 0.9, True), optax.sgd(0.1, 0.9, nesterov=True)),
    "adagrad": (updates.adagrad(0.1), optax.adagrad(0.1)),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_updates_equal_those_of_optax(pair):
    results = []
    for update in pair:
        store = Store([KeyRange("k", 6)], ASP(), update)
        store.join("a")
        for clock, gradient in enumerate(gradients()):
            store.push("k", "a", clock, gradient)
        results.append(store.pull("k").values)
    np.testing.assert_allclose(*results, rtol=1e-5)


def test_sparse_pushes_touch_their_keys_alone():
    store = Store([KeyRange("k", 5)], ASP(), updates.adagrad(0.1, initial=0.0))
    store.join("a")
    store.push("k", "a", 0, (np.array([1, 3]), np.array([2.0, -3.0], np.float32)))
    read = store.pull("k", keys=np.array([3, 4, 1]))
    np.testing.assert_allclose(read.values, [0.1, 0.0, -0.1], rtol=1e-5)
    assert store.pull("k", known=read.version).values is None


def test_averages_are_weighted_and_a_quorum_with_grace_waits_for_close():
    store = Store([KeyRange("k", 2)], ASP(), updates.add, quorum=2, grace=1.0)
    for worker in "abc":
        store.join(worker)
    ones = np.ones(2, np.float32)
    store.push("k", "a", 0, Payload((None, ones), weight=3.0))
    assert store.take_quorums() == [] and store.pull("k").values[0] == 0
    store.push("k", "b", 0, Payload((None, 5 * ones), weight=1.0))
    (quorum,) = store.take_quorums()
    assert store.pull("k").values[0] == 0
    store.close(quorum)
    store.close(quorum)  # It comes twice.
    np.testing.assert_allclose(store.pull("k").values, 2.0)
    store.push("k", "c", 0, 7 * ones)  # Late: it counts in the next round.
    store.leave("a")
    store.leave("b")
    np.testing.assert_allclose(store.pull("k").values, 9.0)


def test_damping_and_delay_compensation():
    damped = Store([KeyRange("k", 1)], ASP(), updates.staleness_damped(updates.add))
    formula = updates.delay_compensated(updates.sgd(1.0), 0.5)
    late = Store([KeyRange("k", 1)], ASP(), formula)
    one = np.ones(1, np.float32)
    for store in (damped, late):
        store.join("a")
        store.join("b")
        read = store.pull("k", "a", 0)
        for clock in range(2):
            payload = Payload((None, one), version=-1, read=store.pull("k").values)
            store.push("k", "b", clock, payload)
        late_push = Payload((None, one), version=read.version, read=read.values)
        store.push("k", "a", 0, late_push)
    np.testing.assert_allclose(damped.pull("k").values, 2 + 1 / 3, rtol=1e-6)
    # 1 + 0.5 * 1 * 1 * (-2 - 0) is 0: nothing is left of the late gradient.
    np.testing.assert_allclose(late.pull("k").values, -2.0)


def test_servers_come_and_go_and_a_snapshot_restores_every_clock():
    ranges = [part.range for part in split("w", 100, 8)]
    store = Store(ranges, SSP(1), updates.add, servers=3, replicas=2)
    store.join("a")
    for clock in range(4):
        for key_range in ranges:
            store.push(key_range.name, "a", clock, np.ones(key_range.size, "f4"))
        if clock == 0:
            store.remove_server("server 1", dead=True)
        if clock == 1:
            store.add_server("server 3")
            store.remove_server("server 0")
    assert store.servers == ["server 2", "server 3"]
    assert all((store.pull(r.name).values == 4).all() for r in ranges)
    other = Store(ranges, SSP(1), updates.add)
    other.restore(store.snapshot())
    assert other.clocks("w/0") == {"a": 4} and other.ready("w/0", "a", 4)
    one = Store(ranges, SSP(1), updates.add, servers=2)
    with pytest.raises(RangeLostError, match="use more|more replicas"):
        one.remove_server("server 0", dead=True)


def test_values_are_set_once_per_label_whatever_replica_answers():
    store = Store([KeyRange("k", 2)], ASP(), updates.add, servers=3, replicas=2)
    start, ones = np.zeros(2, np.float32), np.ones(2, np.float32)
    store.join("a")
    store.set_values("k", start)
    store.push("k", "a", 0, ones)
    other = Store([KeyRange("k", 2)], ASP(), updates.add)
    other.restore(store.snapshot())
    for head in store.chains["k"]:  # Both replicas that saw it; a copy is left.
        store.remove_server(head, dead=True)
    for restored in (store, other):
        restored.set_values("k", start)  # The request comes again.
        np.testing.assert_array_equal(restored.pull("k").values, ones)
        restored.set_values("k", 3 * ones, "later")
        np.testing.assert_array_equal(restored.pull("k").values, 3 * ones)


def test_a_worker_joins_at_the_clock_of_the_slowest():
    store, nothing = Store([KeyRange("k", 1)], SSP(2), updates.add), np.zeros(1)
    for worker, pushes in (("fast", 4), ("slow", 2)):
        store.join(worker, 0)
        for clock in range(pushes):
            store.push("k", worker, clock, nothing)
    assert store.join("new") == 2 and store.clocks("k")["new"] == 2
    assert store.ready("k", "fast", 4)
    store.push("k", "fast", 4, nothing)
    assert not store.ready("k", "fast", 5)  # Two others are at clock 2.
    empty = Store([KeyRange("k", 1)], BSP(), updates.add)
    empty.join("a")
    empty.push("k", "a", 0, nothing)
    empty.leave("a")
    assert empty.join("b") == 1  # Rounds count where nobody is left.


def test_few_ranges_move_when_a_server_joins_and_the_load_is_even():
    names, servers = [f"r{i}" for i in range(200)], [f"s{i}" for i in range(8)]
    before, after = chains(names, servers, 2), chains(names, [*servers, "s8"], 2)
    moved = sum(before[name][0] != after[name][0] for name in names)
    assert 0 < moved < 80
    heads = [chain[0] for chain in before.values()]
    assert max(map(heads.count, servers)) <= 32  # 5/4 of 25, rounded up.
    assert all(len(set(chain)) == 2 for chain in before.values())


def test_wires_keep_their_errors_for_the_next_push():
    wire, sent = PushEncoder("int4"), np.zeros(300, np.float32)
    values = np.random.default_rng(1).normal(size=300).astype(np.float32)
    for clock in range(8):
        payload = wire.encode("k", values, clock, values)
        sent += decoders("int4")["int4"](payload.data, 300, {})[1]
    np.testing.assert_allclose(sent / 8, values, atol=0.06)
    assert payload.data.nbytes == 512 // 2 + 2 * 4  # Two blocks and their scales.


@pytest.mark.parametrize(
    ("decode", "words"),
    [
        (lambda *_: 1 / 0, "decoder of 'own' gives no pair .*ZeroDivisionError"),
        (lambda *_: 3, "decoder of 'own' gives no pair"),
        (lambda *_: (np.zeros(2), np.zeros(2)), "keys are float64: use whole numbers"),
    ],
)
def test_a_decoder_that_fails_is_refused_and_changes_nothing(decode, words):
    parts = [KeyRange("k", 4)]
    store = Store(parts, ASP(), updates.add, decoders={"own": decode})
    store.join("a")
    with pytest.raises(MeshparError, match=words):
        store.push("k", "a", 0, Payload(0, "own"))
    assert store.clocks("k") == {"a": 0}


def test_a_push_that_the_update_refuses_changes_nothing():
    store = Store(
        [KeyRange("k", 4)], ASP(), updates.delay_compensated(updates.add, 0.5)
    )
    store.join("a")
    with pytest.raises(MeshparError, match="the values that the worker read"):
        store.push("k", "a", 0, np.ones(4, np.float32))
    assert store.clocks("k") == {"a": 0} and not store.pull("k").values.any()
    read = np.zeros(4, np.float32)
    store.push("k", "a", 0, Payload((None, np.ones(4, np.float32)), read=read))
    assert store.clocks("k") == {"a": 1}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.push("k", "a", 3, np.zeros(4)), "pushes clock 3 .* is at clock 0"),
        (lambda s: s.push("k", "a", 0, np.zeros(3)), r"shape \(3,\), not \(4,\)"),
        (lambda s: s.push("k", "b", 0, np.zeros(4)), "worker b is no member"),
        (lambda s: s.push("q", "a", 0, np.zeros(4)), "range 'q': the store has"),
        (lambda s: s.pull("k", keys=np.array([9])), "keys outside 0 to 3"),
        (lambda s: s.push("k", "a", 0, Payload(0, "zip")), "no decoder for .*'zip'"),
        (lambda s: s.remove_server("server 0"), "cannot leave"),
        (lambda s: (s.leave("a"), s.join("a")), "use a new name"),
        (lambda s: s.restore({}), "the snapshot holds ranges"),
        (lambda s: Store([], BSP(), updates.add), "use at least one"),
        (lambda s: Store([KeyRange("k", 1)], BSP(), "sgd"), "an optax optimizer or"),
        (lambda s: parse_consistency("ssp:-1"), "use bsp, asp"),
        (lambda s: SSP(-1), "use a whole number"),
        (lambda s: split("w", 3, 4), "use 1 to 3"),
    ],
)
def test_what_the_store_refuses(call, words):
    store = Store([KeyRange("k", 4)], SSP(1), updates.add)
    store.join("a")
    with pytest.raises(MeshparError, match=words):
        call(store)


def test_an_optimizer_that_looks_at_whole_tensors_is_refused():
    """A store updates each key range alone; LAMB's norm would be that of a range."""
    with pytest.raises(MeshparError, match="looks at whole tensors"):
        as_update(optax.lamb(1e-2))
    with pytest.raises(MeshparError, match="draws random numbers"):
        as_update({"values": optax.noisy_sgd(1e-2, key=0)})
