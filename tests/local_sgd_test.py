"""Local SGD against the papers' recurrences, computed plainly in one process."""

import contextlib
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_models
from flax import nnx
from tiny_models import host, relative_error

import meshpar
from meshpar import local_contract, local_sgd
from meshpar.checkpoint import Checkpoints
from meshpar.local_sgd import Schedule, StalenessError

ROWS, STEPS = 16, 14


class Regression(nnx.Module):
    """Two layers; its parameters fill several blocks of a quantized wire."""

    def __init__(self, rngs):
        self.up = nnx.Param(
            rngs.params.normal((8, 40)) / 3, out_sharding=("embed", "mlp")
        )
        self.down = nnx.Param(
            rngs.params.normal((40, 8)) / 6, out_sharding=("mlp", "embed")
        )
        self.bias = nnx.Param(jnp.zeros(8), out_sharding=(None,))


def loss(model, batch):
    hidden = jnp.tanh(batch["x"] @ model.up[...])
    made = hidden @ model.down[...] + model.bias[...][None]
    return jnp.square(made - batch["y"]).mean()


MODEL = meshpar.from_nnx(Regression, loss)


def batch(seed):
    random = np.random.default_rng(seed)
    x = random.normal(size=(ROWS, 8)).astype(np.float32)
    return {"x": x, "y": np.sin(x @ np.random.default_rng(0).normal(size=(8, 8)))}


def lowered(layout, optimizer, **options):
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    example = jax.tree.map(lambda x: x.astype(np.float32), batch(0))
    return meshpar.lower(MODEL, optimizer, layout, example, devices=devices, **options)


def rows(seed):
    return jax.tree.map(lambda x: x.astype(np.float32), batch(seed))


def trained(program, steps=STEPS):
    state, seen = program.init(0), []
    for step in range(1, steps + 1):
        state, metrics = program.step(state, rows(step))
        seen.append(metrics)
    return state, seen


@functools.cache
def gradient():
    return jax.jit(jax.grad(lambda p, b: MODEL.loss(p, b, jax.random.key(0))[0]))


def flat(params):
    return np.concatenate([np.asarray(x).reshape(-1) for x in params.values()])


def like(params, vector):
    made, offset = {}, 0
    for path, x in params.items():
        made[path] = jnp.asarray(vector[offset : offset + x.size].reshape(x.shape))
        offset += x.size
    return made


class Int8:
    """The wire written down plainly: 256 numbers share a scale, an eighth of a byte."""

    largest = 127

    def __call__(self, x):
        blocks = np.pad(x, (0, -len(x) % 256)).reshape(-1, 256)
        scale = np.abs(blocks).max(1, keepdims=True) / np.float32(self.largest)
        numbers = np.round(blocks / np.where(scale == 0, 1, scale))
        return (numbers * scale).reshape(-1)[: len(x)].astype(np.float32)


class Int4(Int8):
    largest = 7


def bf16(x):
    return np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))


LOSSY = {"int8": Int8(), "int4": Int4(), "bf16": bf16}


def reference(program, mode, inner, steps=STEPS):
    """Params of every replica after `steps`, from the recurrences of the papers."""
    replicas, count = program.layout.replica, mode.fragments
    start = host(program.model.init(jax.random.key(0)))
    size = program.outer.chunk_size * mode.num_chunks
    params = [start] * replicas
    states = [inner.init(start) for _ in params]
    center = flat(start)
    pieces = [slice(f * size, (f + 1) * size) for f in range(count)]
    outer = mode.outer or optax.sgd(1.0)
    memory = [outer.init(jnp.asarray(center[piece])) for piece in pieces]
    wire = LOSSY.get(mode.wire, lambda x: x)
    dropped_up = np.zeros((replicas, len(center)), np.float32)
    dropped_down = np.zeros(len(center), np.float32)
    begins, period, number, flying = 0, None, -1, []

    def center_step(f, snapshots):
        """What comes back to every replica: [R, fragment]."""
        piece = pieces[f]
        old = center[piece].copy()
        if mode.gossip is not None:
            matrix = np.asarray(mode.gossip.rounds(replicas))
            matrix = matrix[flying_number % len(matrix)]
            return np.array(matrix @ snapshots, np.float32)
        differences = []
        for r in range(replicas):
            x = snapshots[r] - old + dropped_up[r, piece]
            sent = wire(x)
            dropped_up[r, piece] = x - sent if mode.error_feedback else 0
            differences.append(sent)
        mean = np.mean(differences, axis=0)
        elastic = isinstance(mode.merge, meshpar.Elastic)
        if elastic:
            update = replicas * mode.merge.alpha * mean
        else:
            update, memory[f] = outer.update(-mean, memory[f], jnp.asarray(old))
            update = np.asarray(update) * (1 + mode.staleness) ** -mode.damping
        x = update + dropped_down[piece]
        dropped_down[piece] = x - wire(x) if mode.error_feedback else 0
        center[piece] = old + wire(x)
        return np.tile(old if elastic else center[piece], (replicas, 1))

    for step in range(1, steps + 1):
        for r in range(replicas):
            own = jax.tree.map(lambda x, r=r: np.split(x, replicas)[r], rows(step))
            g = gradient()(params[r], own)
            update, states[r] = inner.update(g, states[r], params[r])
            params[r] = optax.apply_updates(params[r], update)
        if period is None or step > begins + period:
            begins = step - 1
            period = mode.period(begins) if callable(mode.period) else mode.period
            number += 1
        together = callable(mode.period) and period == 1
        delay = 0 if together else mode.staleness
        for f in range(count):
            due = 1 if together else (f + 1) * period // count
            if step - begins == due:
                taken = np.stack([flat(p)[pieces[f]] for p in params])
                flying.append((step + delay, f, taken, number))
        for one in [one for one in flying if one[0] == step]:
            flying.remove(one)
            _, f, taken, flying_number = one
            back = center_step(f, taken)
            for r in range(replicas):
                now = flat(params[r])
                mine = now[pieces[f]]
                now[pieces[f]] = {
                    meshpar.Overwrite: lambda a, x, s: a,
                    meshpar.Shift: lambda a, x, s: a + x - s,
                    meshpar.Lerp: lambda a, x, s: (
                        mode.merge.own * x + (1 - mode.merge.own) * a
                    ),
                    meshpar.Elastic: lambda a, x, s: x - mode.merge.alpha * (s - a),
                }[type(mode.merge)](back[r], mine, taken[r])
                params[r] = like(start, now)
    return params


SGD, MOMENTUM, ADAM = optax.sgd(0.1), optax.sgd(0.05, 0.9), optax.adam(1e-2)
NESTEROV = optax.sgd(0.7, 0.9, nesterov=True)
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
    "inner", [SGD, MOMENTUM, optax.sgd(0.05, 0.9, nesterov=True)], ids=str
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
    declared, found = local_contract.synchronization(program)
    assert declared.violations(found) == [] and found


def test_a_longer_period_than_the_run_is_independent_runs():
    """Bit for bit: nothing of one replica reaches another."""
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
        for path, x in host(plain.params).items():
            assert (got[path] == x).all(), path
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
    schedule, launched, moved, syncs = Schedule(mode), {}, {}, 0
    for step in range(1, 6 * period + 1):
        transfer, arrive, launch, at_once, _ = schedule.actions(step)
        if transfer is not None:
            done = moved.setdefault(transfer.fragment, [])
            gathered = graph is not None or transfer.gather in (None, len(done) - 1)
            assert gathered or transfer.gather == transfer.scatter
            if transfer.scatter is not None:
                assert transfer.scatter == len(done)
                done.append(transfer.gather)
        if arrive is not None:
            assert step == launched.pop(arrive) + s and not at_once | (s == 0)
            assert len(moved.pop(arrive)) == mode.num_chunks
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
        local_sgd.check_arrival(mode, 0, -1, 3)


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
    assert program.violations() == [] and len(local_contract.transfers(program)) == 2
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of 11 steps with a synchronization on its way, and its program."""
    mode = meshpar.LocalSGD(6, staleness=4, outer=NESTEROV, wire="int8")
    program = lowered("replica=2,fsdp=2", ADAM, mode=mode)
    state, _ = trained(program, 8)
    folder = tmp_path_factory.mktemp("run") / "c"
    with contextlib.closing(opened(folder, program)) as checkpoints:
        extra = program.extra_state(state)
        checkpoints.save(8, program.in_model_order(state), {}, extra)
    return folder, program, host(state)


def opened(folder, program):
    return Checkpoints(
        folder,
        program.portable_state,
        num_replicas=program.layout.replica,
        abstract_extra=program.abstract_extra,
        extra_identity=program.extra_identity,
    )


def restored(folder, program):
    with contextlib.closing(opened(folder, program)) as checkpoints:
        return checkpoints.restore()


def test_resumes_bit_for_bit_while_a_synchronization_is_on_its_way(saved):
    folder, program, _ = saved
    found = restored(folder, program)
    assert found.note == ""
    state = program.as_stored(found.state, found.extra)
    for step in range(9, STEPS + 1):
        state, _ = program.step(state, rows(step))
    want = trained(program)[0]
    for got, unbroken in zip(*map(jax.tree.leaves, (state, want)), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(unbroken))


@pytest.mark.parametrize(
    "layout, kept",
    [
        ("replica=2,tensor=2", "kept apart"),
        ("replica=4", "replaced by their average"),
        ("data=2", "replaced by their average"),
    ],
)
def test_restores_onto_other_replicas_through_the_average(saved, layout, kept):
    folder, program, before = saved
    mode = program.mode if "replica" in layout else None
    other = lowered(layout, ADAM, mode=mode)
    found = restored(folder, other)
    assert "2 replicas" in found.note and kept in found.note
    state = other.as_stored(found.state, found.extra)
    average = {path: x.mean(0) for path, x in before.params.items()}
    assert relative_error(host(other.weights(state)), average) < 1e-6
    if kept == "kept apart":
        for path, x in host(state.params).items():
            np.testing.assert_array_equal(x, before.params[path])
    for step in range(9, STEPS + 1):  # Nothing waits for what was on its way.
        state, metrics = other.step(state, rows(step))
    assert np.isfinite(metrics["loss"])


def test_another_mode_does_not_take_up_what_was_on_its_way(saved):
    """Its shapes are the same, but its schedule is not."""
    folder, program, before = saved
    mode = dataclasses.replace(program.mode, period=7)
    other = lowered("replica=2,fsdp=2", ADAM, mode=mode)
    found = restored(folder, other)
    assert "kept apart" in found.note and found.extra is None
    state = other.as_stored(found.state, found.extra)
    for path, x in host(state.params).items():
        np.testing.assert_array_equal(x, before.params[path])
    for step in range(9, STEPS + 1):
        state, metrics = other.step(state, rows(step))
    assert np.isfinite(metrics["loss"])


def test_modes_are_told_apart():
    warm = meshpar.LocalSGD(meshpar.warm_up(8, 4))
    assert warm.identity() == meshpar.LocalSGD(meshpar.warm_up(8, 4)).identity()
    others = [meshpar.LocalSGD(meshpar.warm_up(9, 4)), meshpar.LocalSGD(4)]
    others += [meshpar.LocalSGD(8, staleness=1), meshpar.LocalSGD(8, staleness=2)]
    assert len({mode.identity() for mode in (warm, *others)}) == 5


def test_a_synchronous_checkpoint_starts_replicas(tmp_path):
    program = lowered("data=2", ADAM)
    state, _ = trained(program, 3)
    with contextlib.closing(opened(tmp_path / "c", program)) as checkpoints:
        checkpoints.save(3, state, {})
    mode = meshpar.LocalSGD(4, staleness=1)
    other = lowered("replica=4", ADAM, mode=mode)
    found = restored(tmp_path / "c", other)
    new = other.as_stored(found.state, found.extra)
    for path, x in host(new.params).items():
        np.testing.assert_array_equal(x, np.stack([state.params[path]] * 4))
    new, _ = other.step(new, rows(4))
    assert int(new.step) == 4


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
