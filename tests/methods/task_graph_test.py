"""Task graphs: drawn graphs against their edges, delays against a count."""

import threading
import time

import numpy as np
import pytest

from meshpar.errors import MeshparError
from meshpar.islands import ASP, Store, split, updates
from meshpar.methods.task_graph import TaskGraph

WORKERS, STEPS = 3, 12


@pytest.mark.parametrize("seed", range(5))
def test_tasks_follow_those_that_they_wait_for(seed):
    draws, graph, events = np.random.default_rng(seed), TaskGraph(), []

    def task(number, seconds):
        def run():
            events.append(("start", number))
            time.sleep(seconds)
            events.append(("stop", number))
            return number

        return run

    edges = []
    for number in range(40):
        after = draws.choice(number, min(number, 2), replace=False).tolist()
        seconds, worker = draws.random() * 1e-3, int(draws.integers(4))
        assert graph.add(task(number, seconds), worker, after) == number
        edges.append((worker, after))
    assert graph.run() == list(range(40))
    place = {event: i for i, event in enumerate(events)}
    own = {worker: [] for worker in range(4)}
    for number, (worker, after) in enumerate(edges):
        for before in [*after, *own[worker][-1:]]:
            assert place["stop", before] < place["start", number]
        own[worker].append(number)


def most_behind(delay):
    """Most iterations that worker 0 was behind when another one started.

    In each of its iterations it waits until the others have gone as far as they may.
    """
    done, worst, changed = [0] * WORKERS, [0], threading.Condition()

    def step(iteration, worker):
        with changed:
            worst[0] = max(worst[0], iteration - min(done))
            if worker == 0:
                ahead = STEPS if delay is None else min(STEPS, iteration + delay + 1)
                assert changed.wait_for(lambda: min(done[1:]) >= ahead, timeout=60)
            done[worker] = iteration + 1
            changed.notify_all()

    graph = TaskGraph()
    graph.iterate(step, STEPS, WORKERS, delay)
    graph.run()
    assert done == [STEPS] * WORKERS
    return worst[0]


@pytest.mark.parametrize("delay, most", [(0, 0), (1, 1), (3, 3), (None, STEPS - 1)])
def test_a_delay_is_kept_and_used(delay, most):
    assert most_behind(delay) == most


def test_a_graph_over_a_store_trains_as_synchronous_sgd_in_numpy():
    """A store that bounds nothing, and a graph that does: one more task applies."""
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(WORKERS, 8, 4)), draws.normal(size=(WORKERS, 8))
    (part,) = split("w", 4, 1)
    store = Store([part.range], ASP(), updates.sgd(1.0))
    store.join("all")
    gradients, rate, graph, before = {}, 0.1, TaskGraph(), ()

    def gradient(w, worker):
        return x[worker].T @ (x[worker] @ w - y[worker]) / 8

    def compute(worker):
        w = np.array(store.pull(part.range.name).values)
        gradients[worker] = gradient(w, worker)

    def apply(step):
        mean = sum(gradients[worker] for worker in range(WORKERS)) / WORKERS
        store.push(part.range.name, "all", step, np.float32(rate * mean))

    for step in range(5):
        own = [
            graph.add(lambda w=worker: compute(w), worker, before)
            for worker in range(WORKERS)
        ]
        before = (graph.add(lambda s=step: apply(s), WORKERS, own),)
    graph.run()
    wanted = np.zeros(4)
    for _ in range(5):
        wanted = wanted - rate * np.mean([gradient(wanted, i) for i in range(3)], 0)
    np.testing.assert_allclose(store.pull(part.range.name).values, wanted, atol=1e-6)


def test_a_task_that_fails_ends_the_graph():
    graph, ran = TaskGraph(), []

    def fail():
        raise ValueError("no such file")

    first = graph.add(fail, 0)
    graph.add(lambda: ran.append(1), 1, [first])
    graph.add(lambda: ran.append(0), 0)
    with pytest.raises(ValueError, match="no such file"):
        graph.run()
    assert ran == []


def test_graphs_that_cannot_be():
    graph = TaskGraph()
    with pytest.raises(MeshparError, match=r"task 0 waits for \[0\]"):
        graph.add(lambda: None, after=[0])
    with pytest.raises(MeshparError, match="worker=-1"):
        graph.add(lambda: None, worker=-1)
    with pytest.raises(MeshparError, match="delay=-1"):
        graph.iterate(lambda step, worker: None, 2, 2, -1)
    with pytest.raises(MeshparError, match="iterations=0"):
        graph.iterate(lambda step, worker: None, 0, 2)
    assert graph.tasks == [] and graph.run() == []
