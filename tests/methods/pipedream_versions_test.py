"""PipeDream: versions of weights against a loop of numpy, partitions against all."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar.errors import MeshparError
from meshpar.methods.pipedream import order, partitioner
from meshpar.methods.pipedream.training import PipeDream
from meshpar.methods.pipedream.versions import Versions

N, WIDTH, ROWS = 3, 4, 5
RATE, MOMENTUM = 0.2, 0.9
SGD = optax.sgd(RATE, MOMENTUM)


def stage(params, x):
    return jnp.tanh(x @ params["w"] + params["b"][None])


def loss(y, batch):
    return jnp.square(y - batch["y"]).mean()


def problem(num):
    draws = np.random.default_rng(1)
    start = [
        {"w": draws.normal(size=(WIDTH, WIDTH)), "b": draws.normal(size=WIDTH)}
        for _ in range(N)
    ]
    shape = ROWS, WIDTH
    return start, [
        {name: draws.normal(size=shape) for name in "xy"} for _ in range(num)
    ]


def gradients(weights, batch):
    """By finite differences of a loss in numpy; no chain rule to get wrong."""

    def value(weights):
        h = batch["x"]
        for w in weights:
            h = np.tanh(h @ w["w"] + w["b"])
        return np.square(h - batch["y"]).mean()

    found = [{name: np.zeros_like(x) for name, x in w.items()} for w in weights]
    for w, g in zip(weights, found, strict=True):
        for name, x in w.items():
            for at in np.ndindex(x.shape):
                kept, values = x[at], []
                for step in (1e-5, -1e-5):
                    x[at] = kept + step
                    values.append(value(weights))
                x[at] = kept
                g[name][at] = (values[0] - values[1]) / 2e-5
    return found


def reference(start, batches, versions, per_update):
    """SGD with momentum; versions[t][s] is what minibatch t meets on stage s."""
    copy = lambda tree: {name: x.copy() for name, x in tree.items()}  # noqa: E731
    known, sums = [[copy(w)] for w in start], [[] for _ in start]
    speed = [{name: 0 * x for name, x in w.items()} for w in start]
    for t, batch in enumerate(batches):
        met = [copy(known[s][versions[t][s]]) for s in range(len(start))]
        for s, g in enumerate(gradients(met, batch)):
            sums[s].append(g)
            if len(sums[s]) < per_update[s]:
                continue
            new = {}
            for name, x in known[s][-1].items():
                mean = sum(g[name] for g in sums[s]) / per_update[s]
                speed[s][name] = MOMENTUM * speed[s][name] + mean
                new[name] = x - RATE * speed[s][name]
            known[s].append(new)
            sums[s] = []
    return [k[-1] for k in known]


# By hand, from the picture of the pipeline's order: rows are minibatches.
CASES = {
    "stashed": ({}, [(0, 0, 0), (0, 0, 1), (0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4, 5)]),
    "vertical_sync": (
        {"weights": "vertical_sync"},
        [(0, 0, 0), (0, 0, 0), (0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3)],
    ),
    "double_buffered": (
        {"weights": "double_buffered", "accumulate": 3},
        [(0,) * 3] * 6 + [(1,) * 3] * 3,
    ),
    "replicated": (
        {"replicas": (2, 1, 1)},
        [(0, 0, 0), (0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 3, 4), (1, 4, 5)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_at_the_end_are_those_of_a_loop_of_numpy(name):
    options, versions = CASES[name]
    start, batches = problem(len(versions))
    per_update = [options.get("accumulate", 1)] * N
    per_update = options.get("replicas", per_update)
    with jax.enable_x64(True):
        found = PipeDream([stage] * N, loss, SGD, **options).train(start, batches)
    for (kind, s, t), version in found.used.items():
        assert version == versions[t][s], (kind, s, t)
    wanted = reference(start, batches, versions, per_update)
    for ours, theirs in zip(found.params, wanted, strict=True):
        for path, x in theirs.items():
            np.testing.assert_allclose(ours[path], x, rtol=1e-6, atol=1e-8)


def test_a_stage_holds_the_versions_that_are_in_flight_and_no_more():
    start, batches = problem(9)
    held = {
        name: PipeDream([stage] * N, loss, SGD, **options).train(start, batches).held
        for name, (options, _) in CASES.items()
        if name != "replicated"
    }
    assert held["stashed"] == [3, 2, 1]
    assert held["vertical_sync"] == [3, 3, 3]
    assert held["double_buffered"] == [2, 2, 2]


def test_workers_run_on_devices_of_their_own_and_take_turns():
    pipeline = PipeDream([stage] * N, loss, SGD, replicas=(2, 1, 2))
    assert len(set(pipeline.device.values())) == 5
    found = order.orders((2, 1, 2), 4)
    for worker, ops in found.items():
        count = (2, 1, 2)[worker.stage]
        assert {op.minibatch % count for op in ops} == {worker.replica % count}
        assert sorted(op.minibatch for op in ops if op.kind == "F") == sorted(
            op.minibatch for op in ops if op.kind == "B"
        )
        # Backward passes come in the order of the forward passes.
        assert [op.minibatch for op in ops if op.kind == "B"] == [
            op.minibatch for op in ops if op.kind == "F"
        ]
    assert order.warm_up((3, 1)) == [2, 1] and order.warm_up((1, 1, 1)) == [3, 2, 1]


def test_random_replicas_never_wait_in_a_circle():
    draws = np.random.default_rng(0)
    start, _ = problem(0)
    simple = [np.eye(2)] * 4
    for _ in range(6):
        replicas = tuple(
            int(r) for r in draws.integers(1, 4, int(draws.integers(1, 4)))
        )
        num = 2 * int(np.lcm.reduce(replicas))
        batches = [{"x": np.ones((1, 2)), "y": np.ones((1, 2))}] * num
        pipeline = PipeDream(
            [lambda w, x: x @ w] * len(replicas),
            loss,
            SGD,
            replicas=replicas,
            devices=jax.devices()[:1] * sum(replicas),
        )
        found = pipeline.train(simple[: len(replicas)], batches)
        assert all(x is not None for x in found.losses)


def every_partition(layers, machines):
    """(stages as runs of layers, machines of each) of all partitions."""
    for cuts in itertools.product((False, True), repeat=len(layers) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(layers)]
        for counts in itertools.product(range(1, machines + 1), repeat=len(edges) - 1):
            if sum(counts) == machines:
                yield list(itertools.pairwise(edges)), counts


def pace(layers, runs, counts, bandwidth):
    """Seconds per minibatch of the slowest stage or link."""
    found = []
    for (a, b), m in zip(runs, counts, strict=True):
        compute = sum(x.seconds for x in layers[a:b])
        weights = sum(x.weight_bytes for x in layers[a:b])
        found += [compute / m, 2 * (m - 1) / m * weights / bandwidth / m]
        if b < len(layers):
            found.append(2 * layers[b - 1].activation_bytes / bandwidth)
    return max(found)


def test_the_partition_is_the_best_of_all():
    draws = np.random.default_rng(0)
    kinds = set()
    for _ in range(40):
        layers = [
            partitioner.LayerProfile(*draws.uniform(0, [1, 1, 3])) for _ in range(5)
        ]
        machines = int(draws.integers(1, 6))
        found = partitioner.partition(layers, machines, 2.0)
        best = min(
            pace(layers, runs, counts, 2.0)
            for runs, counts in every_partition(layers, machines)
        )
        runs = [(s.first, s.last + 1) for s in found.stages]
        assert found.seconds == pytest.approx(best)
        assert pace(layers, runs, found.replicas, 2.0) == pytest.approx(best)
        assert sum(found.replicas) == machines
        assert found.in_flight == -(-machines // found.replicas[0])
        kinds.add(found.replicas)
    assert len(kinds) > 8


def test_a_profile_has_the_bytes_of_the_layers():
    start, (batch,) = problem(1)
    x = batch["x"].astype(np.float32)
    weights = [jax.tree.map(np.float32, w) for w in start]
    found = partitioner.profile([stage] * N, weights, x, repeats=1)
    assert [p.weight_bytes for p in found] == [4 * (WIDTH**2 + WIDTH)] * N
    assert [p.activation_bytes for p in found] == [4 * ROWS * WIDTH] * N
    assert all(p.seconds > 0 for p in found)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Versions((1, 1), "fresh"), "weights='fresh': use one of"),
        (lambda: Versions((1, 1), "stashed", 2), "accumulate=2 with weights=stashed"),
        (lambda: Versions((1, 1, 1), "double_buffered", 2), "at least 3 minibatches"),
        (lambda: order.orders((2, 3), 8), "use a multiple of 6"),
        (lambda: order.orders((0,), 8), "at least one worker per stage"),
        (lambda: PipeDream([stage], loss, SGD, replicas=(1, 1)), "for 1 stages"),
        (lambda: PipeDream([stage], loss, SGD, replicas=(99,)), "use fewer workers"),
        (lambda: partitioner.partition([], 2, 1.0), "0 layers, 2 machines"),
    ],
)
def test_what_cannot_be_is_refused(make, words):
    with pytest.raises(MeshparError, match=words):
        make()
