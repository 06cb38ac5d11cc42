"""Local SGD against the papers' recurrences, computed plainly in one process."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import tiny_models
from support.regression import (
    ADAM,
    MODEL,
    MOMENTUM,
    NESTEROV,
    ROWS,
    SGD,
    STEPS,
    lowered,
    reference,
    rows,
    trained,
)
from support.tiny_models import host, relative_error

import meshpar
from meshpar.errors import StalenessError
from meshpar.local_sgd import contract, schedule
from meshpar.local_sgd.schedule import Schedule

SWAP = np.eye(4)[[1, 0, 3, 2]]
CASES = {
    "local SGD": (SGD, dict(period=4)),
    "post-local": (MOMENTUM, dict(period=meshpar.warm_up(4, 5))),
    "DiLoCo": (ADAM, dict(period=5, outer=NESTEROV)),
    "streaming DiLoCo": (
        ADAM,
        dict(
            period=6, staleness=3, fragments=2, outer=NESTEROV, merge=meshpar.Lerp(0.5)
        ),
    ),
    "streaming, int4": (
        SGD,
        dict(period=6, staleness=2, fragments=3, outer=NESTEROV, wire="int4"),
    ),
    "streaming after warm-up": (
        ADAM,
        dict(period=meshpar.warm_up(3, 4), staleness=2, fragments=2, outer=NESTEROV),
    ),
    "one step late": (SGD, dict(period=3, staleness=1, merge=meshpar.Overwrite())),
    "shift": (MOMENTUM, dict(period=4, staleness=3)),
    "damping": (SGD, dict(period=4, staleness=2, outer=NESTEROV, damping=1.0)),
    "EASGD": (SGD, dict(period=3, merge=meshpar.Elastic(0.2))),
    "EASGD, late": (MOMENTUM, dict(period=4, staleness=2, merge=meshpar.Elastic(0.1))),
    "EASGD, int8": (SGD, dict(period=3, merge=meshpar.Elastic(0.2), wire="int8")),
    "bf16": (SGD, dict(period=2, wire="bf16")),
    "int8": (SGD, dict(period=4, staleness=2, outer=NESTEROV, wire="int8")),
    "int8, forgetful": (SGD, dict(period=4, wire="int8", error_feedback=False)),
    "gossip, ring": (SGD, dict(period=2, gossip=meshpar.Gossip("ring"))),
    "gossip, exponential": (
        SGD,
        dict(period=3, staleness=2, gossip=meshpar.Gossip("exponential")),
    ),
    "gossip, a graph": (
        SGD,
        dict(period=1, gossip=meshpar.Gossip([np.eye(4) / 2 + SWAP / 2, np.eye(4)])),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_recurrence(name):
    inner, options = CASES[name]
    mode = meshpar.LocalSGD(**options)
    program = lowered("replica=4", inner, mode=mode)
    state, _ = trained(program)
    want = reference(program, mode, inner)
    for r, params in enumerate(want):
        got = {path: np.asarray(x)[r] for path, x in state.params.items()}
        # A number between two bfloat16 values may be rounded either way.
        tolerance = 1e-4 if mode.wire == "bf16" else 2e-5
        assert relative_error(got, host(params)) < tolerance, f"replica {r}"
    assert program.violations() == []


@pytest.mark.parametrize(
    "inner",
    [SGD, MOMENTUM, optax.sgd(0.05, 0.9, nesterov=True)],
    ids=["sgd", "momentum", "nesterov"],
)
def test_period_1_is_synchronous_training(inner):
    apart = trained(lowered("replica=2,fsdp=2", inner, mode=meshpar.LocalSGD(1)))[0]
    together = trained(lowered("data=2", inner))[0]
    got = {path: x.mean(0) for path, x in host(apart.params).items()}
    assert relative_error(got, host(together.params)) < 1e-6


def test_with_adam_inside_it_is_not():
    apart = trained(lowered("replica=2", ADAM, mode=meshpar.LocalSGD(1)))[0]
    together = trained(lowered("data=2", ADAM))[0]
    got = {path: x.mean(0) for path, x in host(apart.params).items()}
    assert relative_error(got, host(together.params)) > 1e-3


@pytest.mark.parametrize(
    "layout, lowering",
    [
        ("replica=2,fsdp=2,tensor=2", "shard_map"),
        ("replica=2,pipe=2,fsdp=2,microbatches=2", "shard_map"),
        ("replica=2,data=2,fsdp=2,zero=2,microbatches=2", "jit"),
    ],
)
def test_any_layout_inside_a_replica(layout, lowering):
    inner, mode = optax.sgd(0.1, 0.9), meshpar.LocalSGD(1, wire="f32")
    program = tiny_models.lower(layout, optimizer=inner, mode=mode, lowering=lowering)
    one = tiny_models.lower("data=1", optimizer=inner)
    states = program.init(0), one.init(0)
    for step in range(2):
        rows = tiny_models.batch(step)
        states = program.step(states[0], rows)[0], one.step(states[1], rows)[0]
    got = host(program.weights(states[0]))
    assert relative_error(got, host(states[1].params)) < 1e-6
    evaluated = program.evaluate(states[0], rows)
    assert float(evaluated["drift"]) < 1e-7
    want = one.evaluate(states[1], rows)["loss"]
    assert float(evaluated["loss"]) == pytest.approx(float(want), rel=1e-5)
    assert program.violations() == []
    declared, found = contract.synchronization(program)
    assert declared.violations(found) == [] and found


def test_a_longer_period_than_the_run_is_independent_runs():
    """Nothing of one replica reaches another, bit for bit."""
    mode = meshpar.LocalSGD(STEPS + 1)
    state, metrics = trained(lowered("replica=2", ADAM, mode=mode))
    for r in range(2):
        mode = meshpar.LocalSGD(STEPS + 1)
        alone = lowered("replica=2", ADAM, mode=mode)
        other = alone.init(0)
        for step in range(1, STEPS + 1):
            mine = jax.tree.map(lambda x, r=r: np.split(x, 2)[r], rows(step))
            noise = jax.tree.map(lambda x, r=r: np.full_like(x, 7 + r), mine)
            parts = (mine, noise) if r == 0 else (noise, mine)
            both = jax.tree.map(lambda *x: np.concatenate(x), *parts)
            other, _ = alone.step(other, both)
        for path, x in state.params.items():
            assert (np.asarray(x)[r] == np.asarray(other.params[path])[r]).all()
        single = lowered("data=1", ADAM)
        plain = single.init(0)
        step_batch = jax.tree.map(lambda x: x[: ROWS // 2], rows(1))
        single = meshpar.lower(
            MODEL, ADAM, "data=1", step_batch, devices=jax.devices()[:1]
        )
        for step in range(1, STEPS + 1):
            mine = jax.tree.map(lambda x, r=r: np.split(x, 2)[r], rows(step))
            plain, _ = single.step(plain, mine)
        got = {path: np.asarray(x)[r] for path, x in state.params.items()}
        # Another program, whose kernels may add up in another order.
        assert relative_error(got, host(plain.params)) < 1e-6
    assert all(m["replica_bytes"] == 0 for m in metrics)


def test_the_exponential_graph_averages_exactly():
    mode = meshpar.LocalSGD(1, gossip=meshpar.Gossip("exponential"))
    program = lowered("replica=8", optax.sgd(0.0), mode=mode)
    state = program.init(0)
    rngs = np.random.default_rng(0)
    apart = {p: rngs.normal(size=x.shape) for p, x in state.params.items()}
    state = state._replace(
        params={
            p: jax.device_put(jnp.asarray(x, jnp.float32), state.params[p].sharding)
            for p, x in apart.items()
        }
    )
    for step in range(3):
        state, _ = program.step(state, rows(step))
    for path, x in host(state.params).items():
        want = np.tile(apart[path].mean(0), (8, *[1] * (x.ndim - 1)))
        np.testing.assert_allclose(x, want, atol=1e-6)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(period=4, staleness=4), "staleness=4 with period=4.*at most 3"),
        (dict(period=4, staleness=-1), "staleness=-1"),
        (dict(period=8, fragments=4, staleness=3), "period / fragments; use at most 2"),
        (dict(period=2, fragments=3), "fragments=3 with period=2"),
        (dict(period=0), "period=0"),
        (dict(period=lambda t: 8 if t < 50 else 2, staleness=2), "with period=2"),
        (dict(period=lambda t: 8 if t < 50 else 1, staleness=2), "at step 56 while a"),
        (dict(merge=meshpar.Elastic(0.1), outer=NESTEROV), "leave `outer` out"),
        (dict(gossip=meshpar.Gossip("ring"), wire="int8"), "leave out wire=int8"),
        (dict(gossip=meshpar.Gossip("ring"), outer=NESTEROV), "leave out outer"),
        (dict(damping=-1.0), "damping=-1"),
    ],
)
def test_bounds_are_refused_with_the_numbers(options, words):
    with pytest.raises(StalenessError, match=words):
        meshpar.LocalSGD(**options)


def test_what_does_not_fit_the_layout_is_refused():
    with pytest.raises(meshpar.LayoutError, match="replica=2.*mode=LocalSGD"):
        lowered("replica=2", SGD)
    with pytest.raises(meshpar.LayoutError, match="add replica=N"):
        lowered("data=2", SGD, mode=meshpar.LocalSGD())
    with pytest.raises(StalenessError, match="replicas \\* alpha = 1.6"):
        lowered("replica=4", SGD, mode=meshpar.LocalSGD(merge=meshpar.Elastic(0.4)))
    with pytest.raises(meshpar.MeshparError, match="needs a power of 2"):
        meshpar.Gossip("exponential").rounds(6)
    with pytest.raises(meshpar.MeshparError, match="rows and columns have to sum to 1"):
        meshpar.Gossip([np.eye(4) / 2]).rounds(4)
    with pytest.raises(meshpar.MeshparError, match="wire='int7'"):
        meshpar.LocalSGD(wire="int7")


MODES = [
    (period, s, fragments, graph)
    for period, s, fragments in itertools.product((1, 2, 5, 8), (0, 1, 2, 4), (1, 2, 4))
    if s < period and fragments <= period and s * fragments <= period
    for graph in (None, meshpar.Gossip("ring"))
]


@pytest.mark.parametrize("period, s, fragments, graph", MODES)
def test_every_snapshot_arrives_in_time_and_whole(period, s, fragments, graph):
    mode = meshpar.LocalSGD(period, s, fragments, gossip=graph)
    schedule, launched, syncs = Schedule(mode), {}, 0
    scattered, gathered = {}, {}
    for step in range(1, 6 * period + 1):
        transfer, arrive, launch, at_once, _ = schedule.actions(step)
        if transfer is not None:
            if transfer.scatter is not None:
                scattered.setdefault(transfer.fragment, []).append(transfer.scatter)
            if transfer.gather is not None:
                gathered.setdefault(transfer.fragment, []).append(transfer.gather)
                assert transfer.gather in scattered[transfer.fragment]
        if arrive is not None:
            assert step == launched.pop(arrive) + s and not at_once | (s == 0)
            chunks = list(range(mode.num_chunks))
            assert scattered.pop(arrive) == chunks
            assert gathered.pop(arrive, []) == (chunks if graph is None else [])
            syncs += 1
        for fragment in launch:
            if at_once:
                syncs += 1
            else:
                launched[fragment] = step
    assert syncs + len(launched) == 6 * fragments


def test_a_late_arrival_stops_the_run(monkeypatch):
    """Broken on purpose: a snapshot that is applied one step after the bound."""
    true = Schedule.actions

    def late(self, step):
        arrive = true(self, step - 1).arrive if step > 1 else None
        return true(self, step)._replace(arrive=arrive)

    monkeypatch.setattr(Schedule, "actions", late)
    mode = meshpar.LocalSGD(4, staleness=2)
    with pytest.raises(StalenessError, match="step 7: fragment 0.*step 4.*bound is s"):
        trained(lowered("replica=2", SGD, mode=mode))
    with pytest.raises(StalenessError, match="was never taken"):
        schedule.check_arrival(mode, 0, -1, 3)


@pytest.mark.parametrize(
    "options, ratio",
    [
        (dict(), 1),
        (dict(staleness=3), 1),
        (dict(wire="bf16"), 1 / 2),
        (dict(wire="int8"), 1 / 4),
        (dict(wire="int4", staleness=2, fragments=2), 1 / 8),
    ],
)
def test_bytes_are_those_of_synchronous_training_over_the_period(options, ratio):
    """Per device, counted over whole periods; quantized wires add their scales."""
    period = 8
    mode = meshpar.LocalSGD(period, **options)
    program = lowered("replica=4,fsdp=2", ADAM, mode=mode)
    state, sent = program.init(0), 0.0
    for step in range(2 * period + 3):
        state, metrics = program.step(state, rows(step))
        sent += metrics["replica_bytes"]
        if options.get("staleness") is None and (step + 1) % period:
            assert metrics["replica_bytes"] == 0
    outer = program.outer
    padded = outer.chunk_size * program.mode.num_chunks * program.mode.fragments
    shards = sum(np.prod(s) for s in outer.shapes.values())
    assert padded - shards < 4 * 4 * 256 * program.mode.fragments
    synchronous = 2 * 4 * padded * 3 / 4
    per_step = sent / (2 * period)
    assert per_step == pytest.approx(synchronous / period * ratio, rel=0.1)
    assert program.violations() == []


def test_a_wrong_contract_fails(monkeypatch):
    mode = meshpar.LocalSGD(4, staleness=2, wire="int8")
    program = lowered("replica=4", SGD, mode=mode)
    assert program.violations() == [] and len(contract.transfers(program)) == 2
    true = type(program.outer).terms

    def smaller(self, *args):
        return [
            dataclasses.replace(term, payload_bytes=term.payload_bytes - 4)
            for term in true(self, *args)
        ]

    monkeypatch.setattr(type(program.outer), "terms", smaller)
    lines = "\n".join(program.violations())
    assert "all_to_all over replica" in lines and "all_gather over replica" in lines
    monkeypatch.setattr(type(program.outer), "terms", lambda *_: [])
    assert "none declared" in program.violations()[0]
    at_once = lowered("replica=4", SGD, mode=meshpar.LocalSGD(4, wire="int8"))
    assert "at once: all_gather over replica" in "\n".join(at_once.violations())


@pytest.mark.parametrize("wire, share", [("f32", 2 / 4), ("int8", 1 + 1 + 2 / 4)])
def test_memory_is_in_the_plan(wire, share):
    """Momentum takes 1/R, and so do global weights, unless the wire is lossy."""
    mode = meshpar.LocalSGD(8, outer=NESTEROV, wire=wire)
    program = tiny_models.lower("replica=4,fsdp=2", mode=mode)
    kept = {leaf.path: leaf.bytes_per_device for leaf in program.plan.synchronization}
    outer = program.outer
    whole = 4 * outer.chunk_size
    assert kept["outer[0].trace"] == whole // 4
    assert sum(kept.values()) == pytest.approx(whole * share)
    assert program.plan.bytes_per_device()["synchronization"] == sum(kept.values())
    sync = program.abstract_state.sync
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(sync))
    assert held == 8 * sum(kept.values())
    late = dataclasses.replace(mode, staleness=2, fragments=2)
    program = tiny_models.lower("replica=4,fsdp=2", mode=late)
    kept = {leaf.path: leaf.bytes_per_device for leaf in program.plan.synchronization}
    fragment = 4 * program.outer.chunk_size * late.num_chunks
    assert kept["snapshot"] == kept["arrived"] == fragment
