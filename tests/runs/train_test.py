"""`meshpar.train`: a run in a script equals its plain loop, and goes on anywhere."""

import functools
import os
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from support import own_run, planted_flips, processes, tiny_runs
from support.marks import slow

import meshpar
from meshpar.checkpoint import find_checkpoints, read_params, read_weights
from meshpar.checkpoint.blocks import read_in_blocks
from meshpar.errors import CheckpointError, ConfigError, DataError
from meshpar.runs import metrics
from meshpar.runs.config import RunConfig
from meshpar.runs.data import Place
from meshpar.runs.data_forms import as_data
from meshpar.runs.finite import FiniteCheck
from meshpar.runs.modes import IslandsConfig
from meshpar.runs.programs import make_plans
from meshpar.runs.replica_check import ReplicaError
from meshpar.runs.step_log import NonFiniteError

BATCH = 16


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return x + nnx.gelu(self.dense(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(4)])
        self.head = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)[:, 0]


def loss(model, batch):
    error = model(batch["x"]) - batch["y"]
    return (error**2).mean(), {"mae": abs(error).mean()}


def arrays(number=200):
    x = np.random.default_rng(0).normal(size=(number, 8)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(-1))}


def run(model=Net, **changes):
    fields = dict(loss=loss, layers="layers", evaluation=arrays(60))
    fields |= {"optimizer": optax.adam(1e-2), "data": arrays()}
    return meshpar.Run(model, **{**fields, **changes})


def train(workdir, layout="data=2,fsdp=2", steps=10, **settings):
    own = dict(batch_size=BATCH, checkpoint_every=4, evaluate_every=5, seed=3)
    own |= settings
    own_run = own.pop("run", None) or run()
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    own = {"devices": devices} | own
    return meshpar.train(
        own_run, layout=layout, steps=steps, workdir=str(workdir), **own
    )


def plain_losses(steps):
    """Losses of a loop of plain optax on the same batches."""
    model = meshpar.from_nnx(Net, loss)  # Only to draw the same weights at the start.
    graph, _ = nnx.split(Net(nnx.Rngs(0)))
    start = nnx.state(model.bind(model.init(jax.random.key(3))))
    optimizer = optax.adam(1e-2)
    state = optimizer.init(start)

    @jax.jit
    def step(params, state, batch):
        def of(params):
            return loss(nnx.merge(graph, params), batch)[0]

        value, grads = jax.value_and_grad(of)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    place = Place(BATCH, range(BATCH), 3)
    batches = as_data(arrays()).training_batches(place)
    losses, params = {}, start
    for number in range(1, steps + 1):
        params, state, value = step(params, state, next(batches))
        losses[number] = float(value)
    return losses


def test_a_run_equals_its_plain_loop_and_resumes_under_another_layout(tmp_path):
    first = train(tmp_path, steps=6)
    assert not first.stopped and int(first.state.step) == 6
    second = train(tmp_path, "pipe=2,data=2")
    expected, found = plain_losses(10), tiny_runs.losses(tmp_path)
    assert found.keys() == expected.keys()
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)
    assert {row["step"] for row in second.metrics if "evaluation_loss" in row} == {
        *(5, 6, 10)
    }
    assert second.weights()["layers/3/dense/kernel"].shape == (8, 8)


def weighted_loss(model, batch):
    logits = model.head(model.layers[0](batch["x"]))[:, 0] / batch["temperature"]
    weights = batch["weights"][(batch["y"] > 0).astype(int)]
    errors = weights * (logits - batch["y"]) ** 2
    return errors.mean(), {"most": meshpar.metrics.Max(errors.max())}


def with_weights(number):
    weights = meshpar.Replicated(np.array([1, 5], np.float32))
    return arrays(number) | {"weights": weights, "temperature": np.float32(2)}


@pytest.mark.parametrize("layout", ["data=2,fsdp=4", slow("data=8")])
def test_evaluation_is_that_of_all_samples(tmp_path, layout):
    """58 samples in batches of 16: three of them, and 10 samples more."""
    own = run(
        loss=weighted_loss,
        layers="",
        data=with_weights(64),
        evaluation=with_weights(58),
    )
    done = train(tmp_path, layout, 2, run=own, evaluate_every=2)
    (row,) = (row for row in done.metrics if "evaluation_loss" in row)
    module = done.program.update(Net(nnx.Rngs(0)), done.state)
    batch = with_weights(58)
    batch["weights"] = batch["weights"].value
    value, aux = weighted_loss(module, batch)
    assert row["evaluation_loss"] == pytest.approx(float(value), rel=1e-5)
    (most,) = aux["most"]
    assert row["evaluation_most"] == pytest.approx(float(most), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data=8", slow("data=2,fsdp=4")])
def test_two_processes_evaluate_all_samples(tmp_path, layout):
    """60 samples in batches of 16: the last 12 do not divide over eight devices."""
    recipe = "--recipe=tests/support/own_run.py:net"
    done = subprocess.run(
        [
            *("launch/local.sh", f"--log_dir={tmp_path / 'logs'}", "2", "--"),
            *(sys.executable, "-m", "experiments.run", recipe, "--steps=2"),
            *(f"--layout={layout}", f"--workdir={tmp_path / 'two'}"),
        ],
        cwd=tiny_runs.ROOT,
        env=processes.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on 8 cpu device(s), 2 process(es)" in done.stdout
    own, one = own_run.net(steps=2), jax.devices()[:1]
    settings = dict(layout="data=1", steps=2, batch_size=BATCH, devices=one)
    alone = meshpar.train(own, workdir=str(tmp_path / "one"), **settings)
    module = alone.program.update(own_run.Net(16, 4, nnx.Rngs(0)), alone.state)
    value, _ = own_run.loss(module, own.evaluation)
    rows = metrics.read(tmp_path / "two" / "metrics.jsonl")
    for found in (alone.metrics, rows):
        (row,) = (row for row in found if "evaluation_loss" in row)
        assert row["evaluation_loss"] == pytest.approx(float(value), rel=1e-5)


class NamedNet(Net):
    """Names the axis of its own mesh that splits a kernel: "tp"."""

    def __init__(self, rngs):
        super().__init__(rngs)
        for layer in self.layers:
            metadata = {"out_sharding": (None, "tp")}
            layer.dense = nnx.Linear(8, 8, kernel_metadata=metadata, rngs=rngs)

    def __call__(self, x):
        return jax.lax.with_sharding_constraint(super().__call__(x), P("dp"))


def test_names_of_a_models_own_mesh_axes(tmp_path):
    named = run(NamedNet, axis_names={"tensor": "tp", "data": "dp"}, evaluation=None)

    class Config(RunConfig):
        def prepared(self):
            return self, named.checked()

    config = Config("", batch_size=BATCH)
    wanted = {"require": 'tensor=2,allow="bias|head"', "top": 1}
    plans = make_plans(config, named.checked(), jax.devices()[:2], **wanted)
    assert "axes.dp=data,axes.tp=tensor" in str(plans.layout)
    layout = "tensor=2,allow=bias|head"
    trained = train(tmp_path, layout, steps=2, run=named)
    assert str(trained.program.layout).endswith('axes.tp=tensor,allow="bias|head"')
    spec = trained.program.plan.specs["layers/dense/kernel"]
    assert spec == P(None, None, "tensor")
    plain, found = run(NamedNet, evaluation=None), tiny_runs.losses(tmp_path)
    train(tmp_path / "plain", "data=1,axes.dp=none,axes.tp=none", steps=2, run=plain)
    expected = tiny_runs.losses(tmp_path / "plain")
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)


@pytest.mark.slow
def test_an_instance_starts_from_its_own_weights(tmp_path):
    module = Net(nnx.Rngs(7))
    before = np.asarray(module.head.kernel[...])
    done = train(tmp_path, "data=4", 1, run=run(module), checkpoint_every=100)
    after = np.asarray(done.weights()["head/kernel"])
    # Adam's first step moves every weight by the rate.
    np.testing.assert_allclose(abs(after - before), 1e-2, rtol=1e-3)


@pytest.mark.slow
def test_a_signal_stops_a_run_which_the_same_call_goes_on_with(tmp_path, monkeypatch):
    tiny_runs.stop_after(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    stopped = train(tmp_path)
    assert stopped.stopped and 3 <= int(stopped.state.step) < 10
    monkeypatch.undo()
    assert int(train(tmp_path).state.step) == 10
    losses, expected = tiny_runs.losses(tmp_path), plain_losses(10)
    np.testing.assert_allclose(
        [losses[step] for step in expected], list(expected.values()), rtol=1e-5
    )


def test_callbacks_hear_of_steps_evaluations_and_whole_checkpoints(tmp_path):
    steps, evaluations, checkpoints = {}, {}, {}

    def after_evaluation(step, metrics, program, state):
        weights = program.evaluated_params(state)["head/bias"]
        evaluations[step] = metrics, int(state.step), np.asarray(weights)

    def after_checkpoint(step, folder):
        found = {x.step: x.path for x in find_checkpoints(folder.parent)}
        checkpoints[step] = found[step] == folder

    def heard(folder, **changes):
        own = run(
            after_step=steps.__setitem__,
            after_evaluation=after_evaluation,
            after_checkpoint=after_checkpoint,
            **changes,
        )
        return train(tmp_path / folder, run=own)

    done = heard("heard")
    rows = {row["step"]: row for row in done.metrics if "loss" in row}
    assert steps == {
        step: {k: x for k, x in row.items() if k != "step" and "startup" not in k}
        for step, row in rows.items()
    }
    assert list(steps) == list(range(1, 11))
    assert checkpoints == {4: True, 8: True, 10: True}
    assert {step: at for step, (_, at, _) in evaluations.items()} == {5: 5, 10: 10}
    found, _, weights = evaluations[10]
    assert found["loss"] == done.metrics[-1]["evaluation_loss"]
    np.testing.assert_array_equal(done.weights()["head/bias"], weights)

    def fail(step, metrics):
        if step == 6:
            raise ValueError("no room for a picture")

    with pytest.raises(ValueError, match="no room"):
        train(tmp_path / "failed", run=run(after_step=fail))
    assert [x.step for x in find_checkpoints(tmp_path / "failed/checkpoints")] == [4]
    with pytest.raises(ConfigError, match="after_step=3.*give a function"):
        train(tmp_path / "bad", run=run(after_step=3))


@pytest.mark.parametrize("every, at", [slow(3, 6), (100, 8)])
def test_a_flipped_bit_ends_a_run_before_its_next_checkpoint(tmp_path, every, at):
    """Also where no comparison is due; then the same call trains as if it never was."""
    undo = planted_flips.flip_after(5)
    wrong = rf"step {at}: .*device 3 of process 0 is wrong.* that of step 4,"
    try:
        with pytest.raises(ReplicaError, match=wrong):
            train(tmp_path, "data=4", check_replicas=every)
    finally:
        undo()
    assert not (tmp_path / "checkpoints" / str(at)).exists()
    assert int(train(tmp_path, "data=4", check_replicas=every).state.step) == 10
    losses, expected = tiny_runs.losses(tmp_path), plain_losses(10)
    np.testing.assert_allclose(
        [losses[step] for step in expected], list(expected.values()), rtol=1e-5
    )


def test_islands_have_no_copies_to_compare(tmp_path):
    with pytest.raises(ConfigError, match="check_replicas=5: islands have weights"):
        train(tmp_path, "data=1", optimizer_mode="islands", check_replicas=5)


def test_islands_that_wait_for_each_other_go_on_as_if_undisturbed(tmp_path):
    """Under BSP nothing depends on timing, so every loss is equal."""
    settings = dict(
        layout="data=1",
        devices=jax.devices()[:2],
        optimizer_mode="islands",
        islands=IslandsConfig(workers=2, consistency="bsp"),
    )
    whole = train(tmp_path / "whole", steps=6, **settings)
    train(tmp_path / "halves", steps=3, **settings)
    halves = train(tmp_path / "halves", steps=6, **settings)

    assert halves.metrics[-1]["evaluation_loss"] == whole.metrics[-1]["evaluation_loss"]
    np.testing.assert_array_equal(
        *(x.weights()["layers/0/dense/kernel"] for x in (halves, whole))
    )


@pytest.mark.slow
def test_two_runs_in_one_process_and_one_in_a_thread(tmp_path):
    done = []
    thread = threading.Thread(
        target=lambda: done.append(train(tmp_path / "a", "data=2", 2))
    )
    thread.start()
    thread.join()
    done.append(train(tmp_path / "b", "data=2", 2))
    losses = [tiny_runs.losses(tmp_path / name) for name in "ab"]
    assert losses[0] == losses[1] and len(done) == 2


def diverges_at(last):
    """SGD whose update is infinite at one step; its loss and gradient are not."""

    def update(updates, count, params=None):
        scale = jnp.where(count == last - 1, jnp.inf, -1e-3)
        return jax.tree.map(lambda x: x * scale, updates), count + 1

    return optax.GradientTransformation(lambda params: jnp.int32(0), update)


@pytest.mark.parametrize("layout", [slow("data=2,fsdp=2"), "pipe=2,data=2"])
def test_a_state_that_is_not_finite_is_never_saved(tmp_path, layout):
    run_of = functools.partial(meshpar.Run, Net, data=arrays(), loss=loss)
    diverging = run_of(optimizer=diverges_at(8), layers="layers")
    words = r"step 8: head/bias is not finite.*last good checkpoint is that of step 4"
    with pytest.raises(NonFiniteError, match=words):
        train(tmp_path, layout, 8, run=diverging)
    steps = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert "4" in steps and "8" not in steps
    mended = run_of(optimizer=diverges_at(100), layers="layers")
    done = train(tmp_path, layout, 8, run=mended)
    assert all(np.isfinite(x).all() for x in done.weights().values())


def test_a_saved_state_that_is_not_finite_is_refused_and_the_last_good_one_found(
    tmp_path, monkeypatch
):
    """As an earlier version, or another program, could save one."""
    own = functools.partial(meshpar.Run, Net, data=arrays(), loss=loss)
    with monkeypatch.context() as patch:
        patch.setattr(FiniteCheck, "problem", lambda *_: "")
        diverged = train(tmp_path, "data=2", 8, run=own(optimizer=diverges_at(8)))
    newest = find_checkpoints(tmp_path / "checkpoints")[-1]
    program, mended = diverged.program, own(optimizer=diverges_at(100))
    words = "8: head/bias holds NaN or infinite"
    with pytest.raises(CheckpointError, match=words):
        read_params(newest, program.portable_state.params)
    shapes = {path: x.shape for path, x in program.portable_state.params.items()}
    with pytest.raises(CheckpointError, match=words):
        list(read_in_blocks(newest, dict(sorted(shapes.items()))))
    with pytest.raises(CheckpointError, match="state: params/head/bias holds NaN or"):
        read_weights(newest.path / "state", program, "")
    with pytest.raises(CheckpointError, match="checkpoint 8 .*--resume=last_good"):
        train(tmp_path, "data=2", 8, run=mended)
    assert not (tmp_path / "corrupt").exists()
    done = train(tmp_path, "data=2", 8, run=mended, resume="last_good")
    assert all(np.isfinite(x).all() for x in done.weights().values())
    assert [row["step"] for row in done.metrics if "loss" in row] == [*range(1, 9)]
    assert [path.name for path in (tmp_path / "corrupt").iterdir()] == ["8-0"]


def test_infinite_scalars_of_an_optimizer_are_no_divergence(tmp_path):
    """A best loss that is not known yet is infinite."""
    plateau = optax.contrib.reduce_on_plateau(patience=5)
    optimizer = optax.chain(optax.sgd(1e-3), plateau)
    done = train(tmp_path, "data=2", 4, run=run(optimizer=optimizer))
    assert int(done.state.step) == 4


@pytest.mark.parametrize(
    "settings, error, words",
    [
        ({"step": 3}, ConfigError, r"train\(step=...\): .*did you mean 'steps'"),
        ({"steps": 0}, ConfigError, "steps=0: use a whole number of steps"),
        (
            {"resume": "best"},
            ConfigError,
            "resume='best'.: use 'newest' or 'last_good'",
        ),
        ({"layout": "fsdp=16"}, meshpar.LayoutError, "only 8|16"),
        ({"batch_size": 1000}, DataError, "fewer than one batch of 1000"),
    ],
)
def test_bad_arguments_write_nothing(tmp_path, settings, error, words):
    with pytest.raises(error, match=words):
        train(tmp_path / "w", **settings)
    assert not (tmp_path / "w").exists()


def test_a_dataset_that_ends_too_early_is_refused_before_the_first_step(tmp_path):
    import grain

    rows = [{name: x[i] for name, x in arrays(40).items()} for i in range(40)]
    short = meshpar.Run(Net, optax.sgd(0.1), grain.MapDataset.source(rows), loss)
    with pytest.raises(DataError, match=r"take 160 samples, and the data hold 40"):
        train(tmp_path / "w", run=short)
    assert not (tmp_path / "w").exists()


def test_a_stream_that_ends_says_so_and_keeps_its_checkpoint(tmp_path):
    import grain

    rows = [{name: x[i] for name, x in arrays(100).items()} for i in range(100)]
    stream = grain.MapDataset.source(rows).to_iter_dataset()
    short = meshpar.Run(Net, optax.sgd(1e-3), stream, loss)
    with pytest.raises(DataError, match="the data end after step 6"):
        train(tmp_path, run=short)
    assert (tmp_path / "checkpoints" / "4").is_dir()
