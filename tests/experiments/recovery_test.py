"""Recovery of a run: nothing that a kill or a lost folder prevented stays missing."""

import os
import pathlib
import shutil
import signal
import time

import pytest
from support.marks import slow
from support.tiny_runs import train_on_one_device as train

from experiments import recipes
from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.errors import CheckpointError
from meshpar.runs import metrics
from meshpar.runs.config import with_settings
from meshpar.runs.trainer import RESTART, Trainer

STEPS = 4


class KilledError(Exception):
    """Ends a run in the place where it is raised."""


def config(text, workdir, *settings):
    common = [
        *(f"data.path={text}", f"workdir={workdir}", f"steps={STEPS}"),
        *("sample_tokens=0", "checkpoint_every=2", "evaluate_every=2"),
    ]
    return with_settings(recipes.get("tiny"), [*common, *settings])


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    """The folder of a run that nothing disturbed, and its local disk."""
    folder = tmp_path_factory.mktemp("unbroken")
    disk = f"checkpoint_local_dir={folder}/disk"
    assert train(config(text, folder / "run", disk)) == 0
    return folder


@pytest.fixture
def finished(unbroken, tmp_path):
    """A copy of that run in a folder of its own, as if it had been trained there."""
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    run_id = tmp_path / "run/checkpoints/run_id"
    run_id.write_text(run_id.read_text().replace(str(unbroken), str(tmp_path)))
    return tmp_path


def by_step(workdir, name):
    rows = metrics.read(pathlib.Path(workdir) / "metrics.jsonl")
    return {row["step"]: row[name] for row in rows if name in row}


def saved(workdir):
    found = (pathlib.Path(workdir) / "checkpoints").iterdir()
    return {int(path.name) for path in found if path.name.isdigit()}


@pytest.mark.parametrize("lost", [slow([STEPS]), [2, STEPS]])
def test_a_step_that_only_local_disks_hold_is_written_to_the_folder(
    lost, finished, text, capsys
):
    """As if the process had been killed while it wrote these steps."""
    run = finished / "run"
    for step in lost:
        shutil.rmtree(run / "checkpoints" / str(step))
    disk = f"checkpoint_local_dir={finished}/disk"
    assert train(config(text, run, disk)) == 0
    assert f"step {STEPS} comes from local disks" in capsys.readouterr().out
    assert STEPS in saved(run)
    shutil.rmtree(finished / "disk")
    assert train(config(text, run)) == 0
    assert f"already at step {STEPS}" in capsys.readouterr().out


def test_a_damaged_last_checkpoint_is_found_and_written_again(finished, text, capsys):
    """Though the local disk holds the step, from which a run would go on."""
    run, disk = finished / "run", f"checkpoint_local_dir={finished}/disk"
    for file in (run / "checkpoints" / str(STEPS) / "state").rglob("d/*"):
        os.truncate(file, file.stat().st_size // 2)
    assert train(config(text, run, disk)) == 0
    assert f"step {STEPS} comes from local disks" in capsys.readouterr().out
    assert [path.name for path in (run / "corrupt").iterdir()] == [f"{STEPS}-0"]
    shutil.rmtree(finished / "disk")
    assert train(config(text, run)) == 0
    assert f"already at step {STEPS}" in capsys.readouterr().out


def test_a_run_whose_last_checkpoint_is_gone_does_not_end_well(
    text, tmp_path, monkeypatch
):
    wait = Checkpoints.wait

    def then_lose(self):
        wait(self)
        shutil.rmtree(tmp_path / "checkpoints" / str(STEPS))

    monkeypatch.setattr(Checkpoints, "wait", then_lose)
    with pytest.raises(
        CheckpointError, match=f"not hold the checkpoint of step {STEPS}"
    ):
        train(config(text, tmp_path))


@pytest.mark.parametrize("step", [2, slow(STEPS)])
def test_an_evaluation_that_a_kill_prevented_is_made_up(
    step, unbroken, text, tmp_path, monkeypatch
):
    evaluate = Trainer._evaluate

    def killed(self, state, at, *arguments):
        if at == step:
            raise KilledError
        evaluate(self, state, at, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_evaluate", killed)
        with pytest.raises(KilledError):
            train(config(text, tmp_path))
    assert step not in by_step(tmp_path, "evaluation_loss")
    assert train(config(text, tmp_path)) == 0
    losses = by_step(tmp_path, "evaluation_loss")
    assert losses == pytest.approx(by_step(unbroken / "run", "evaluation_loss"))
    monkeypatch.setattr(Trainer, "_evaluate", None)  # None is due any more.
    assert train(config(text, tmp_path)) == 0


@pytest.mark.slow
def test_an_evaluation_that_a_signal_prevented_is_made_up(text, tmp_path, monkeypatch):
    write = metrics.MetricsLog.write

    def stopping(self, step, **values):
        write(self, step, **values)
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    often = config(text, tmp_path, "evaluate_every=1", "checkpoint_every=1")
    with monkeypatch.context() as patch:
        patch.setattr(metrics.MetricsLog, "write", stopping)
        assert train(often) == RESTART
    assert [*by_step(tmp_path, "loss")] == [1, 2]
    assert [*by_step(tmp_path, "evaluation_loss")] == [1]
    assert train(often) == 0
    assert [*by_step(tmp_path, "evaluation_loss")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "trace", ["run.json", slow("metrics.jsonl"), slow("corrupt"), slow("run_id")]
)
def test_a_folder_whose_checkpoints_are_gone_is_refused(trace, finished, text):
    """The record, or in runs without one anything else, shows the older run."""
    run = finished / "run"
    run_id = (run / "checkpoints/run_id").read_bytes()
    rows = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints")
    (run / "corrupt" / "4-0").mkdir(parents=True)
    for name in {"run.json", "metrics.jsonl", "corrupt"} - {trace}:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if trace == "run_id":
        (run / "checkpoints").mkdir()
        (run / "checkpoints/run_id").write_bytes(run_id)
    for _ in range(2):  # The refusal itself changes nothing.
        with pytest.raises(CheckpointError, match=f"{trace}.*add --start_anew"):
            train(config(text, run))
    if trace == "metrics.jsonl":
        assert (run / "metrics.jsonl").read_bytes() == rows


@pytest.mark.parametrize("only_id_is_left", [False, slow(True)])
def test_start_anew_trains_in_a_folder_whose_checkpoints_are_gone(
    only_id_is_left, finished, text, capsys
):
    run = finished / "run"
    rows = (run / "metrics.jsonl").read_bytes()
    for path in (run / "checkpoints").iterdir():
        if path.name != "run_id":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    if only_id_is_left:
        for name in ("run.json", "metrics.jsonl"):
            (run / name).unlink()
    else:
        shutil.rmtree(run / "checkpoints")
    assert train(config(text, run, "steps=2"), start_anew=True) == 0
    assert saved(run) == {2}
    assert [*by_step(run, "loss")] == [1, 2]  # Not the older run's.
    if not only_id_is_left:
        assert (run / "metrics.jsonl").read_bytes().startswith(rows)
    assert train(config(text, run), start_anew=True) == 0
    assert "going on from step 2" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again(
    text, tmp_path, monkeypatch
):
    def killed(*_):
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save", killed)
        with pytest.raises(KilledError):
            train(config(text, tmp_path))
    assert [*by_step(tmp_path, "loss")] == [1, 2]
    assert train(config(text, tmp_path)) == 0
    assert [*by_step(tmp_path, "loss")] == [1, 2, 3, 4]


def test_the_first_checkpoint_is_recorded_before_the_run_ends(
    text, tmp_path, monkeypatch
):
    def killed(*_):
        raise KilledError

    monkeypatch.setattr(Checkpoints, "wait", killed)
    monkeypatch.setattr(Trainer, "_evaluate", lambda *_: time.sleep(1))
    with pytest.raises(KilledError):
        train(config(text, tmp_path))
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="add --start_anew"):
        train(config(text, tmp_path))
