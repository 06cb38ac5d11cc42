"""Runs as a user starts them: what they leave, resume, signals, errors."""

import dataclasses
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from support import commands
from support.marks import slow
from support.tiny_runs import ROOT, config, losses, stop_after, train

from experiments import recipes
from meshpar.commands import command_line, devices
from meshpar.errors import CheckpointError, MeshparError
from meshpar.runs import guards, metrics
from meshpar.runs.config import with_settings
from meshpar.runs.step_log import NonFiniteError
from meshpar.runs.trainer import RESTART, Trainer


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
    kept = sorted(p.name for p in (workdir / "checkpoints").iterdir())
    assert kept == ["10", "12"]


@pytest.mark.parametrize(
    "number, layout", [(signal.SIGTERM, "fsdp=4"), slow(signal.SIGINT, "data=1")]
)
def test_a_signal_saves_and_another_layout_goes_on(
    number, layout, unbroken, text, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        stop_after(patch, 7, lambda: os.kill(os.getpid(), number))
        profiles = number == signal.SIGTERM
        assert train(config(text, tmp_path), profile=profiles) == RESTART
    assert any((tmp_path / "profile").rglob("*.xplane.pb")) == profiles
    assert 7 <= max(losses(tmp_path)) < 12
    assert train(config(text, tmp_path), layout) == 0
    found = losses(tmp_path)
    assert list(found) == list(range(1, 13))
    np.testing.assert_allclose(
        list(found.values()), list(unbroken[0].values()), rtol=1e-5
    )


def test_a_finished_run_says_so_and_changes_nothing(unbroken, text, capsys):
    before = losses(unbroken[1])
    assert train(config(text, unbroken[1])) == 0
    assert "already at step 12 of 12; raise --steps" in capsys.readouterr().out
    assert losses(unbroken[1]) == before


@pytest.mark.parametrize(
    "setting, words",
    [
        slow("seed=1", "seed=0.*this command has seed=1"),
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


@pytest.mark.slow
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


def test_words_that_are_no_flags_are_an_error(tmp_path, monkeypatch, capsys):
    words = ["stray", f"--workdir={tmp_path}/w"]
    done = commands.run("run", words, monkeypatch, capsys)
    assert done.code == 2 and "are not flags" in done.err
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("arguments, words", BAD_INPUT)
def test_bad_input_is_an_error(arguments, words, tmp_path, monkeypatch):
    """As experiments.run does it, in this process and on its devices."""
    monkeypatch.setattr(devices, "simulate", lambda num_devices: None)
    fails = pytest.raises(MeshparError, match=words)
    with flagsaver.flagsaver(), command_line.knowing(recipes.CATALOG), fails:
        flags.FLAGS(["run", "--recipe=bytes-llama", *arguments])
        config = command_line.config_from_flags()
        config = dataclasses.replace(config, workdir=f"{tmp_path}/w")
        layout, own = devices.start_devices(config)
        config = devices.with_layout(config, layout)
        Trainer(config, layout, own, False).run()
    assert not (tmp_path / "w").exists()


def test_bad_input_ends_a_process_without_a_traceback(tmp_path):
    arguments, words = BAD_INPUT[4]
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
