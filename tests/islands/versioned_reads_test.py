"""Reads of one version of all ranges, while workers train and a server dies."""

import numpy as np
import pytest

from meshpar.errors import MeshparError
from meshpar.islands import ASP, BSP, KeyRange, Store, updates
from meshpar.islands.messages import Pull
from meshpar.islands.node import Node

RANGES = [KeyRange("a", 3), KeyRange("b", 2), KeyRange("c", 4)]
WORKERS = "xy"


def gradient(worker, clock, size):
    draws = np.random.default_rng([ord(worker), clock, size])
    return draws.normal(size=size).astype(np.float32)


def weights(rounds, size):
    """The values of a range after some rounds of SGD on means of two workers."""
    w = np.zeros(size)
    for clock in range(rounds):
        w -= 0.5 * np.mean([gradient(n, clock, size) for n in WORKERS], axis=0)
    return w


def store(history, consistency=BSP):
    servers = dict(servers=3, replicas=2)
    made = Store(RANGES, consistency(), updates.sgd(0.5), history=history, **servers)
    for worker in WORKERS:
        made.join(worker)
    return made


def push(made, worker, clock, ranges=RANGES):
    for one in ranges:
        made.push(one.name, worker, clock, gradient(worker, clock, one.size))


def check(found, rounds):
    version, values = found
    assert version == rounds
    for one in RANGES:
        wanted = weights(rounds, one.size)
        np.testing.assert_allclose(values[one.name], wanted, rtol=0, atol=1e-6)


def test_a_reader_sees_whole_rounds_alone_while_others_train():
    made = store(history=2)
    for clock in range(4):
        push(made, "x", clock)
        push(made, "y", clock, RANGES[:2])  # Range "c" is a round behind.
        newest = {one.name: made.pull(one.name).version for one in RANGES}
        assert newest == {"a": clock + 1, "b": clock + 1, "c": clock}
        check(made.pull_version(), clock)
        push(made, "y", clock, RANGES[2:])
        check(made.pull_version(), clock + 1)
    check(made.pull_version(2), 2)


def test_versions_are_on_all_replicas_and_in_snapshots():
    made = store(history=3)
    for clock in range(5):
        push(made, "x", clock)
        push(made, "y", clock)
    made.remove_server("server 0", dead=True)
    made.add_server("server 3")
    made.remove_server("server 1", dead=True)
    for version in (2, 3, 4, 5):
        check(made.pull_version(version), version)
    for history, oldest in ((3, 2), (1, 4), (0, 5)):
        other = store(history=history)
        other.restore(made.snapshot())
        check(other.pull_version(oldest), oldest)
        with pytest.raises(MeshparError, match=f"version {oldest - 1} is gone"):
            other.pull_version(oldest - 1)


def test_a_read_of_keys_of_an_older_version():
    made = store(history=2)
    for clock in range(3):
        push(made, "x", clock)
        push(made, "y", clock)
    keys = np.array([0, RANGES[0].size - 1])
    answer = made._servers.pull("a", "", 0, keys, -1, 1)
    assert answer.version == 1
    wanted = weights(1, RANGES[0].size)[keys]
    np.testing.assert_allclose(answer.values, wanted, rtol=0, atol=1e-6)


def test_versions_that_are_not_kept_or_not_reached():
    made = store(history=1)
    for clock in range(3):
        push(made, "x", clock)
        push(made, "y", clock)
    check(made.pull_version(2), 2)
    with pytest.raises(MeshparError, match="version 1 is gone: a is at 3 and keeps 2"):
        made.pull_version(1)
    with pytest.raises(MeshparError, match="version=4: use 0 to 3"):
        made.pull_version(4)
    with pytest.raises(MeshparError, match="history=-1"):
        store(history=-1)
    made = store(history=0, consistency=ASP)
    push(made, "x", 0)
    assert made.pull_version()[0] == 1  # The newest one needs no history.


def test_a_read_of_a_version_to_come_waits():
    made = store(history=1)
    server = made.chains["a"][-1]
    node: Node = made._servers._nodes[server]
    ask = Pull("reader", 1, made._servers.view.epoch, "a", "", 0, None, -1, 1)
    assert node.handle(ask) == [] and node.waits(ask)
    push(made, "x", 0)
    assert node.waits(ask)
    operate, sent = node.handle, []
    node.handle = lambda message: (
        lambda out: (
            sent.extend(s for s in out if s.to == "reader"),
            [s for s in out if s.to != "reader"],
        )[1]
    )(operate(message))
    push(made, "y", 0)
    (answer,) = sent
    assert answer.message.version == 1
    np.testing.assert_allclose(answer.message.values, weights(1, 3), rtol=0, atol=1e-6)
