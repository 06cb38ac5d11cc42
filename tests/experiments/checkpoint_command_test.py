"""The command that looks at checkpoints and exports weights."""

import re
import shutil
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver
from support import commands
from support.marks import slow
from support.tiny_runs import ROOT

from experiments import checkpoint, recipes
from experiments.interchange import runs
from meshpar.checkpoint import persistent
from meshpar.commands import checkpoint as library_command
from meshpar.commands import command_line
from meshpar.errors import CheckpointError, MeshparError


@pytest.fixture
def checkpoint_command(monkeypatch, capsys):
    """Runs experiments.checkpoint in this process; returns exit code and output."""
    monkeypatch.setattr(library_command, "simulate", lambda num_devices: None)

    def command(*words):
        with flagsaver.flagsaver(), command_line.knowing(recipes.CATALOG):
            code = checkpoint.main(flags.FLAGS(["checkpoint", *map(str, words)]))
        return code, capsys.readouterr().out

    return command


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
    rows = {line.split("│")[1].strip(): line for line in lines}
    assert [step for step in rows if step] == ["10", "12", "15"]  # "" goes on.
    assert "cannot be read" in rows["10"] and "complete" in rows["12"]
    assert "data=2,fsdp=2" in rows["12"] and "192" in rows["12"]
    assert "incomplete" in rows["15"]


@pytest.mark.parametrize(
    "layout, code, words",
    [
        slow("pipe=2,fsdp=2,microbatches=2", 0, "can go on from step 12"),
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


@pytest.mark.slow
def test_the_checkpoint_program_ends_with_1_for_no(unbroken):
    """A process has the devices that the layout needs."""
    tool = [sys.executable, "-m", "experiments.checkpoint", str(unbroken[1])]
    done = subprocess.run(
        [*tool, "--can_resume=fsdp=32"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stderr
    assert re.search("no: batch=16 does not divide", done.stdout, re.DOTALL)


def test_an_export_of_changed_weights_is_refused(unbroken, tmp_path):
    newest = persistent.find_checkpoints(unbroken[1] / "checkpoints")[-1]
    runs.export(newest, tmp_path / "whole")
    names, sums = list(newest.metadata["tensors"]), newest.metadata["checksums"][0]
    wrong = list(sums)
    wrong[names.index(".params['norm/scale']")] += 1
    changed = newest.metadata | {"checksums": [wrong, []]}
    with pytest.raises(CheckpointError, match="is corrupt: .*norm/scale.* has changed"):
        runs.export(newest._replace(metadata=changed), tmp_path / "changed")
    assert not (tmp_path / "changed").exists()


def test_the_checkpoint_command_needs_a_folder_with_checkpoints(
    tmp_path, checkpoint_command, monkeypatch, capsys
):
    with pytest.raises(CheckpointError, match="give one folder"):
        checkpoint_command()
    done = commands.run("checkpoint", [str(tmp_path)], monkeypatch, capsys)
    assert done.code == 2 and "Traceback" not in done.err
    assert "holds no checkpoint" in done.err
