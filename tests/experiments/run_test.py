"""Runs as a user starts them: resume, signals, faults, errors."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from support import processes

import meshpar
from experiments import checkpoint, command_line, recipes
from experiments.interchange import runs
from experiments.recipes.config import with_settings
from experiments.training import guards, metrics
from experiments.training.step_log import NonFiniteError, StepLog
from experiments.training.trainer import RESTART, Trainer
from meshpar import layouts
from meshpar.checkpoint import persistent
from meshpar.errors import CheckpointError, MeshparError

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A small text with plenty of structure."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    rng = np.random.default_rng(0)
    words = ["alpha ", "beta ", "gamma ", "delta "]
    path.write_text("".join(rng.choice(words, 20_000)))
    return str(path)


def config(text, workdir, **changes):
    tiny = with_settings(
        recipes.get("tiny"), [f"data.path={text}", "steps=12", "sample_tokens=5"]
    )
    return dataclasses.replace(tiny, workdir=str(workdir), **changes)


def train(config, layout="data=2,fsdp=2,tensor=2", profile=False):
    layout = layouts.parse(layout)
    config = dataclasses.replace(config, layout=str(layout))
    devices = jax.devices()[: layout.num_devices]
    return Trainer(config, layout, devices, profile).run()


def losses(workdir):
    rows = metrics.read(pathlib.Path(workdir) / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    """Losses of a run that nothing disturbed, and its folder."""
    workdir = tmp_path_factory.mktemp("unbroken")
    assert train(config(text, workdir), profile=True) == 0
    return losses(workdir), workdir


def test_a_run_learns_and_leaves_everything(unbroken, text):
    found, workdir = unbroken
    assert list(found) == list(range(1, 13))
    assert found[12] < found[1] - 0.5
    rows = metrics.read(workdir / "metrics.jsonl")
    assert {r["step"] for r in rows if "evaluation_loss" in r} == {10, 12}
    wanted = {"step", "loss", "grad_norm", "learning_rate"}
    assert rows[0].keys() == wanted | {"tokens_per_second", "step_seconds"}
    assert (workdir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((workdir / "tensorboard").iterdir())
    assert list((workdir / "profile").rglob("*.xplane.pb"))
    kept = sorted(p.name for p in (workdir / "checkpoints").iterdir())
    assert kept == ["10", "12"]


def stop_after(monkeypatch, step, action):
    """Acts once the metrics of a step have been read."""
    log_step = StepLog._log_step

    def acting(self, finished, *arguments):
        log_step(self, finished, *arguments)
        if finished == step:
            action()

    monkeypatch.setattr(StepLog, "_log_step", acting)


@pytest.mark.parametrize(
    "number, layout", [(signal.SIGTERM, "fsdp=4"), (signal.SIGINT, "data=1")]
)
def test_a_signal_saves_and_another_layout_goes_on(
    number, layout, unbroken, text, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        stop_after(patch, 7, lambda: os.kill(os.getpid(), number))
        assert train(config(text, tmp_path)) == RESTART
    assert 7 <= max(losses(tmp_path)) < 12
    assert train(config(text, tmp_path), layout) == 0
    found = losses(tmp_path)
    assert list(found) == list(range(1, 13))
    np.testing.assert_allclose(
        list(found.values()), list(unbroken[0].values()), rtol=1e-5
    )


def command(text, workdir, *more):
    return [
        *(sys.executable, "-m", "experiments.run", "--recipe=tiny", "--steps=12"),
        *(f"--data={text}", f"--workdir={workdir}", "--set=sample_tokens=5", *more),
    ]


def test_kill_9_loses_only_the_steps_since_the_checkpoint(unbroken, text, tmp_path):
    """The metrics log may be ahead of the checkpoint, and its last line torn."""
    process = subprocess.Popen(command(text, tmp_path), cwd=ROOT)
    log = tmp_path / "metrics.jsonl"
    while max(losses(tmp_path), default=0) < 6 and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    with log.open("a") as file:
        file.write('{"step": 9, "lo')
    assert train(config(text, tmp_path)) == 0
    found = losses(tmp_path)
    assert list(found) == list(range(1, 13))
    np.testing.assert_allclose(
        list(found.values()), list(unbroken[0].values()), rtol=1e-6
    )


def test_a_finished_run_says_so_and_changes_nothing(unbroken, text, capsys):
    before = losses(unbroken[1])
    assert train(config(text, unbroken[1])) == 0
    assert "already at step 12 of 12; raise --steps" in capsys.readouterr().out
    assert losses(unbroken[1]) == before


@pytest.mark.parametrize(
    "setting, words",
    [
        ("seed=1", "seed=0.*this command has seed=1"),
        ("model.embed=64", "another model or optimizer"),
        ("data.held_out=0.2", "data=.*another --workdir"),
    ],
)
def test_a_workdir_of_another_run_is_refused(unbroken, text, setting, words):
    other = with_settings(config(text, unbroken[1]), [setting])
    before = losses(unbroken[1])
    with pytest.raises(MeshparError, match=words):
        train(other, "data=1")
    assert losses(unbroken[1]) == before


def test_two_runs_cannot_share_a_folder(text, tmp_path):
    with guards.own_folder(tmp_path):
        with pytest.raises(CheckpointError, match="another run is writing"):
            with guards.own_folder(tmp_path):
                pass


def test_unwritable_workdir(text, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write to"):
        train(config(text, tmp_path / "file" / "run"), "data=1")


def test_a_loss_that_is_not_finite_stops_and_keeps_the_good_checkpoint(text, tmp_path):
    wild = with_settings(
        config(text, tmp_path, checkpoint_every=2),
        ["optimizer.learning_rate=1e36", "optimizer.warmup_steps=0"],
    )
    calm = config(text, tmp_path, checkpoint_every=2, steps=2)
    assert train(calm, "data=1") == 0
    with pytest.raises(NonFiniteError) as error:
        train(wild, "data=1")
    words = (
        "e+35, at the grad_norm",
        "samples",
        "last good checkpoint is that of step 2",
    )
    for word in words:
        assert word in str(error.value), str(error.value)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["2"]


BAD_INPUT = [
    (["--recipe=tinny"], "did you mean 'tiny'"),
    (["--layout=dta=2"], "did you mean 'data'"),
    (["--set=model.dpth=2"], "did you mean 'depth'"),
    (["--layout=data=8", "--devices=4"], "needs 8 devices"),
    (["--layout=data=2", "--devices=4"], "would leave 2 idle"),
    (["--devices=6"], "does not divide"),
    (["--data=/nowhere/at/all.txt"], "does not exist"),
    (["--num_processes=2"], "give all three or none"),
]


@pytest.mark.parametrize("arguments, words", BAD_INPUT)
def test_bad_input_is_an_error(arguments, words, tmp_path, monkeypatch):
    """As experiments.run does it, in this process and on its devices."""
    monkeypatch.setattr(meshpar, "simulate", lambda num_devices: None)
    with flagsaver.flagsaver(), pytest.raises(MeshparError, match=words):
        flags.FLAGS(["run", *arguments])
        config = command_line.config_from_flags()
        config = dataclasses.replace(config, workdir=f"{tmp_path}/w")
        layout, devices = command_line.start_devices(config)
        config = command_line.with_layout(config, layout)
        Trainer(config, layout, devices, False).run()
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    "arguments, words", [(["stray"], "are not flags"), BAD_INPUT[4]]
)
def test_bad_input_ends_a_program_without_a_traceback(arguments, words, tmp_path):
    run = [sys.executable, "-m", "experiments.run", f"--workdir={tmp_path}/w"]
    done = subprocess.run(
        [*run, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2, done.stderr
    assert "error: " in done.stderr and words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "w").exists()


def test_help_is_short():
    run = [sys.executable, "-m", "experiments.run", "--helpshort"]
    text = subprocess.run(run, cwd=ROOT, capture_output=True, text=True).stdout
    assert "--layout" in text and "--workdir" in text
    assert len(text.splitlines()) < 60


@pytest.mark.parametrize(
    "num, layout",
    [
        (2, "data=2,fsdp=2,tensor=2"),
        pytest.param(
            *(4, "pipe=2,data=2,fsdp=2,microbatches=2"), marks=pytest.mark.slow
        ),
    ],
)
def test_real_processes_go_on_where_one_stopped(
    unbroken, text, tmp_path, monkeypatch, num, layout
):
    """launch/local.sh: one mesh over all, the losses of the single process."""
    workdir, logs = tmp_path / "run", tmp_path / "logs"
    with monkeypatch.context() as patch:
        stop_after(patch, 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert train(config(text, workdir), "fsdp=2") == RESTART
    stopped = max(losses(workdir))
    launch = ["launch/local.sh", f"--log_dir={logs}", str(num), "--"]
    run = command(text, workdir, f"--layout={layout}")
    done = subprocess.run(
        [*launch, *run],
        cwd=ROOT,
        env=processes.environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"on 8 cpu device(s), {num} process(es)" in done.stdout
    assert f"going on from step {stopped}" in done.stdout
    assert (logs / "0.log").exists() and (logs / "1.log").exists()
    found = losses(workdir)
    assert list(found) == list(range(1, 13))
    np.testing.assert_allclose(
        list(found.values()), list(unbroken[0].values()), rtol=1e-5
    )


def test_launch_local_names_the_process_with_another_config(text, tmp_path):
    """One process of three has another seed: all stop before the first collective."""
    logs = tmp_path / "logs"
    script = 'exec "$@" --seed=$((MESHPAR_PROCESS_ID == 1 ? 7 : 0))'
    run = command(text, tmp_path / "run", "--layout=data=3", "--batch_size=12")
    launch = ["launch/local.sh", f"--log_dir={logs}", "3", "--", "bash", "-c", script]
    done = subprocess.run(
        [*launch, "bash", *run], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 2, done.stdout + done.stderr
    for process in range(3):
        said = (logs / f"{process}.log").read_text()
        assert "config: process 1 has" in said and "seed=7" in said, said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_launch_local_returns_the_code_of_the_process_that_fails(tmp_path):
    script = "if ((MESHPAR_PROCESS_ID == 1)); then exit 3; fi; sleep 60"
    launch = ["launch/local.sh", f"--log_dir={tmp_path}", "2", "--", "bash", "-c"]
    began = time.monotonic()
    done = subprocess.run([*launch, script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 3
    assert "process 1 ended with code 3" in done.stderr
    assert time.monotonic() - began < 30


def test_launch_local_passes_a_signal_on_and_the_run_saves(text, tmp_path):
    workdir = tmp_path / "run"
    launch = ["launch/local.sh", f"--log_dir={tmp_path}/logs", "2", "--"]
    run = command(text, workdir, "--layout=fsdp=2", "--steps=2000")
    process = subprocess.Popen(
        [*launch, *run],
        cwd=ROOT,
        env=processes.environment(),
        stdout=subprocess.DEVNULL,
    )
    while max(losses(workdir), default=0) < 3 and process.poll() is None:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(200) == RESTART
    steps = [int(p.name) for p in (workdir / "checkpoints").iterdir()]
    assert max(steps) == max(losses(workdir)) >= 3


def test_verify_command_proves_and_names_differences(text):
    run = [sys.executable, "-m", "experiments.verify", "--recipe=tiny"]
    run += [f"--data={text}", "--layout=fsdp=2,tensor=2", "--verify_steps=2"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("EQUAL: fsdp=2,tensor=2,zero=3"), last
    # A tolerance below rounding finds a difference, names it and exits 1.
    done = subprocess.run(
        [*run, "--json", "--tolerance=1e-12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert not found["equal"]
    first = next(c for c in found["comparisons"] if c["error"] > 1e-12)
    assert found["first_difference"] == first
    kinds = {c["kind"] for c in found["comparisons"]}
    assert kinds == {"evaluation", "loss", "gradient", "grad_norm", "optimizer"}


@pytest.fixture
def checkpoint_command(monkeypatch, capsys):
    """Runs experiments.checkpoint in this process; returns exit code and output."""
    monkeypatch.setattr(meshpar, "simulate", lambda num_devices: None)

    def command(*words):
        with flagsaver.flagsaver():
            code = checkpoint.main(flags.FLAGS(["checkpoint", *map(str, words)]))
        return code, capsys.readouterr().out

    return command


def checkpoint_process(*words):
    tool = [sys.executable, "-m", "experiments.checkpoint", *map(str, words)]
    return subprocess.run(tool, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_the_checkpoint_command_says_what_lies_there(
    unbroken, tmp_path, checkpoint_command
):
    folder = tmp_path / "run"
    shutil.copytree(unbroken[1] / "checkpoints", folder / "checkpoints")
    (folder / "checkpoints" / "15.orbax-checkpoint-tmp-3").mkdir()
    (folder / "checkpoints" / "10" / "metadata" / "metadata").write_text("{")
    code, output = checkpoint_command(folder)
    assert code == 0
    lines = [line for line in output.splitlines() if line.startswith("│")]
    assert [line.split("│")[1].strip() for line in lines] == ["10", "12", "15"]
    assert "cannot be read" in lines[0] and "complete" in lines[1]
    assert "data=2,fsdp=2" in lines[1] and "192" in lines[1]
    assert "incomplete" in lines[2]


@pytest.mark.parametrize(
    "layout, code, words",
    [
        ("pipe=2,fsdp=2,microbatches=2", 0, "can go on from step 12"),
        ("replica=2,tensor=2", 0, "can go on from step 12"),
        ("tensor=3", 1, "no: .*heads=4.* does not divide over tensor=3"),
    ],
)
def test_the_checkpoint_command_knows_what_could_go_on(
    unbroken, layout, code, words, checkpoint_command
):
    exit_code, output = checkpoint_command(unbroken[1], f"--can_resume={layout}")
    assert exit_code == code
    assert re.search(words, output, re.DOTALL), output
    with pytest.raises(MeshparError, match="did you mean 'fsdp'"):
        checkpoint_command(unbroken[1], "--can_resume=fdsp=2")


def test_the_checkpoint_program_ends_with_1_for_no(unbroken):
    done = checkpoint_process(unbroken[1], "--can_resume=fsdp=32")
    assert done.returncode == 1, done.stderr
    assert re.search("no: batch=16 does not divide", done.stdout, re.DOTALL)


def test_an_export_of_changed_weights_is_refused(unbroken, tmp_path, monkeypatch):
    newest, read = (
        persistent.find_checkpoints(unbroken[1] / "checkpoints")[-1],
        persistent.read_checkpoint,
    )
    runs.export(newest, tmp_path / "whole")

    def changed(*arguments):
        state, _ = read(*arguments)
        twice = state.params | {"norm/scale": state.params["norm/scale"] * 2}
        return state._replace(params=twice), None

    monkeypatch.setattr(persistent, "read_checkpoint", changed)
    with pytest.raises(CheckpointError, match="is corrupt: .*norm/scale.* has changed"):
        runs.export(newest, tmp_path / "changed")
    assert not (tmp_path / "changed").exists()


def test_the_checkpoint_command_needs_a_folder_with_checkpoints(
    tmp_path, checkpoint_command
):
    with pytest.raises(CheckpointError, match="give one folder"):
        checkpoint_command()
    done = checkpoint_process(tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "holds no checkpoint" in done.stderr
