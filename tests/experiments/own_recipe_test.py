"""Commands on a recipe of your own: a file, and nothing of the project's catalog."""

import json
import os
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from support import commands, own_run, processes
from support.tiny_runs import ROOT, losses, stop_after

import meshpar
from meshpar.runs import goodput, metrics, recipe_file
from meshpar.runs.catalog import FILES_ALONE
from meshpar.runs.config import with_settings
from meshpar.runs.data import Place
from meshpar.runs.stored import stored_config
from meshpar.runs.trainer import RESTART, Trainer

RECIPE = f"{ROOT}/tests/support/own_run.py:net"


@pytest.fixture
def on_own(monkeypatch, capsys):
    def run(name, *flags):
        return commands.run(name, [f"--recipe={RECIPE}", *flags], monkeypatch, capsys)

    return run


@pytest.fixture(scope="module")
def undisturbed():
    """Losses of a loop of plain optax on the same batches, and of all held-out rows."""
    config, run = recipe_file.config_of(RECIPE).prepared()
    module = run.model.bind(run.model.init(jax.random.key(config.seed)))
    graph, params = nnx.split(module)
    state = run.optimizer.init(params)

    @jax.jit
    def step(params, state, batch):
        def loss(params):
            return own_run.loss(nnx.merge(graph, params), batch)[0]

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = run.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    place = Place(config.batch_size, range(config.batch_size), config.seed)
    batches, found = run.data.training_batches(place), []
    for _ in range(config.steps):
        params, state, value = step(params, state, next(batches))
        found.append(float(value))
    evaluated, _ = own_run.loss(nnx.merge(graph, params), own_run.net().evaluation)
    return found, float(evaluated)


def test_a_run_goes_on_in_two_processes_under_another_layout(
    undisturbed, tmp_path, on_own
):
    """A signal stops it; batches and losses are as undisturbed."""
    workdir = tmp_path / "w"
    words = [f"--workdir={workdir}", "--set=checkpoint_every=3"]
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
        stopped = on_own("run", *words, "--layout=fsdp=2", "--devices=2")
    assert stopped.code == RESTART, stopped.err
    run = [sys.executable, "-m", "experiments.run", f"--recipe={RECIPE}", *words]
    launch = ["launch/local.sh", f"--log_dir={tmp_path}/logs", "2", "--"]
    done = subprocess.run(
        [*launch, *run, "--layout=pipe=2,data=2"],
        cwd=ROOT,
        env=processes.environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found, (expected, evaluated) = losses(workdir), undisturbed
    assert list(found) == list(range(1, 13))
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-5)
    *_, last = metrics.read(workdir / "metrics.jsonl")
    assert last["evaluation_loss"] == pytest.approx(evaluated, rel=1e-5)
    starts = goodput.read(workdir).starts
    assert [start.facts["processes"] for start in starts] == [1, 2]
    assert starts[-1].ended == "done" and starts[-1].restored >= 3


@pytest.mark.slow
def test_verify_judges_it_by_a_plain_loop(on_own):
    done = on_own("verify", "--layout=pipe=2,fsdp=2", "--devices=4", "--verify_steps=2")
    assert not done.code, done.out + done.err
    assert "EQUAL: pipe=2,fsdp=2" in done.out and "a plain loop" in done.out
    padded = on_own("verify", "--layout=data=2", "--devices=2", "--padded")
    assert padded.code == 2 and "has no padded=" in padded.err


@pytest.mark.slow
def test_explain_plan_and_scaling_read_it(on_own, tmp_path):
    done = on_own("explain", "--layout=fsdp=4", "--topology=v5e:2x2", "--json")
    assert not done.code, done.err
    assert json.loads(done.out)["violations"] == []
    done = on_own("plan", "--devices=8", "--set=width=64", "--top=2", "--json")
    assert not done.code, done.err
    assert len(json.loads(done.out)["best"]) == 2
    words = "--topologies=v5e:2x2,v5e:2x4", "--axis=fsdp", "--json"
    done = on_own("scaling", *words)
    assert not done.code, done.err
    assert json.loads(done.out)["times"].keys() == {"4", "8"}


@pytest.mark.slow
def test_checkpoints_say_whether_a_layout_can_resume(monkeypatch, capsys, tmp_path):
    config = with_settings(recipe_file.config_of(RECIPE), ["steps=2", "width=24"])
    layout = meshpar.layouts.parse("fsdp=2")
    config = with_settings(config, [f"workdir={tmp_path}", "layout=fsdp=2"])
    assert Trainer(config, layout, jax.devices()[:2]).run() == 0

    def ask(layout):
        words = [str(tmp_path), f"--can_resume={layout}", f"--recipe={RECIPE}"]
        return commands.run("checkpoint", words, monkeypatch, capsys)

    assert "yes: pipe=2,data=2 can go on from step 2" in ask("pipe=2,data=2").out
    assert "no: " in ask("pipe=8").out
    (checkpoint,) = meshpar.checkpoint.find_checkpoints(tmp_path / "checkpoints")
    assert stored_config(checkpoint, FILES_ALONE, RECIPE).width == 24

    def say(name, *words):
        words = [str(tmp_path), f"--recipe={RECIPE}", *words]
        return commands.run(name, words, monkeypatch, capsys)

    logged = metrics.read(tmp_path / metrics.METRICS)[-1]
    done = say("score", "--layout=data=2,tensor=1", "--devices=2")
    assert not done.code, done.err
    assert "step 2 of" in done.out and "under data=2" in done.out
    for name in ("loss", "mae"):
        found = float(re.search(rf"\b{name} ([0-9.]+)", done.out)[1])
        assert found == pytest.approx(logged[f"evaluation_{name}"], rel=1e-6)
    done = say("score", "--data=x")
    assert done.code == 2 and "has data of its own; leave it out" in done.err
    done = say("score", "--layout=tensor=2")
    assert done.code == 2 and "tensor=2" in done.err
    done = say("score", "--recipe=tiny")
    assert done.code == 2 and "whose code this command would run" in done.err
    words = [str(tmp_path), "--prompt=a"]
    done = commands.run("generate", words, monkeypatch, capsys)
    assert done.code == 2 and "own_run.py:net, and this command needs" in done.err


@pytest.mark.parametrize(
    "name, words, message",
    [
        ("run", ["--set=widht=3"], "did you mean 'width'"),
        ("run", ["--data=x"], "has no setting data.path; give its own arguments"),
        ("run", ["--layout=tensor=2"], "tensor=2"),
        ("verify", ["--set=width=1.5"], "width=1.5: use a whole number"),
        ("explain", ["--generate", "--layout=data=1"], "add length=TOKENS"),
        ("local_sgd_sweep", [], "needs a decoder of the catalog"),
    ],
)
def test_words_that_cannot_be_meant(on_own, name, words, message, tmp_path):
    words = [*words, f"--workdir={tmp_path / 'w'}"] if name == "run" else words
    done = on_own(name, *words)
    assert done.code == 2 and message in done.err, done.err
    assert len(done.err) < 1500 and not (tmp_path / "w").exists()
