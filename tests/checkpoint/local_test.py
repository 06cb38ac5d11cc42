"""Checkpoints on the disks of the machines, in front of the run's own folder."""

import contextlib
import shutil

import numpy as np
import pytest
from checkpoint_test import TINY, assert_equal, on_devices, trained
from support.tiny_models import lower

from meshpar.checkpoint.boxes import Box, assemble_shard, complete_boxes
from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.errors import CheckpointError


def opened(tmp_path, program, run="run", disk="disk"):
    return contextlib.closing(
        Checkpoints(
            tmp_path / run / "c", program.portable_state, local_folder=tmp_path / disk
        )
    )


@pytest.fixture
def saved(tmp_path):
    """Steps 1 (also in the run's folder) to 4; the state of each."""
    program, states = trained()
    with opened(tmp_path, program) as checkpoints:
        for step, state in enumerate(states, 1):
            state, about = on_devices(program, state), {"position": 16 * step}
            checkpoints.save(step, state, about, persistent=step == 1)
    return tmp_path, dict(enumerate(states, 1))


def restored(tmp_path, layout="data=2", **options):
    program = lower(layout, TINY)
    with opened(tmp_path, program, **options) as checkpoints:
        found = checkpoints.restore()
    return found and (found.metadata["position"] // 16, found.state)


def files(tmp_path):
    """{step: file}."""
    found = tmp_path.glob("disk/*/*/0.npz")
    return {int(file.parent.name.partition("-")[0]): file for file in found}


@pytest.mark.parametrize("layout", ["fsdp=4,tensor=2", "data=1", "fsdp=8,zero=1"])
def test_the_newest_is_taken_onto_any_layout(saved, layout):
    tmp_path, states = saved
    assert files(tmp_path).keys() == {2, 3, 4}  # The oldest has gone.
    step, state = restored(tmp_path, layout)
    assert step == 4
    assert_equal(state, states[4])


@pytest.mark.parametrize("damage", ["truncated", "changed", "partial"])
def test_a_bad_file_is_named_and_the_step_before_used(saved, damage, caplog):
    tmp_path, states = saved
    file = files(tmp_path)[4]
    text = file.read_bytes()
    if damage == "truncated":
        file.write_bytes(text[: len(text) // 2])
    elif damage == "changed":
        middle = len(text) // 2
        file.write_bytes(text[:middle] + bytes([text[middle] ^ 1]) + text[middle + 1 :])
    else:  # As a kill leaves it.
        file.rename(file.with_suffix(".partial"))
    step, state = restored(tmp_path)
    assert step == 3
    assert_equal(state, states[3])
    assert damage == "partial" or str(file) in caplog.text
    assert 4 not in files(tmp_path)  # Steps begin anew from 3.


def test_the_durable_copy_serves_when_the_disk_is_gone(saved):
    tmp_path, states = saved
    shutil.rmtree(tmp_path / "disk")
    step, state = restored(tmp_path)
    assert step == 1
    assert_equal(state, states[1])


def test_a_new_run_does_not_find_the_files_of_another(saved):
    tmp_path, _ = saved
    assert restored(tmp_path, run="other") is None
    shutil.rmtree(tmp_path / "run")
    assert restored(tmp_path) is None


def test_a_full_disk_is_a_warning(saved, monkeypatch, caplog):
    tmp_path, _ = saved
    program = lower("data=2", TINY)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with opened(tmp_path, program) as checkpoints:
        monkeypatch.setattr(np, "savez", full)
        checkpoints.save(9, program.init(0), {"position": 144})
    assert "No space left" in caplog.text
    assert restored(tmp_path)[0] == 9  # From the run's own folder.


def test_pieces_by_their_place():
    box = Box("['w']", (0, 4), (2, 3))
    assert Box.parse(str(box)) == box
    assert Box.parse("['step']@+") == Box("['step']", (), ())
    whole = np.arange(24).reshape(4, 6)
    parts = {
        Box("w", (0, 0), (4, 2)): whole[:, :2],
        Box("w", (0, 2), (4, 4)): whole[:, 2:],
    }
    got = assemble_shard("w", whole, parts, (slice(1, 3), slice(1, 5)))
    np.testing.assert_array_equal(got, whole[1:3, 1:5])


def test_a_step_is_complete_if_all_disks_together_hold_it():
    wanted = {"w": np.zeros((4, 2))}
    upper, lower_half = "w@0,0+2,2", "w@2,0+2,2"
    pieces = complete_boxes({0: [upper], 1: [upper, lower_half]}, wanted, "7-a")
    assert list(map(str, pieces)) == [upper, lower_half]
    with pytest.raises(CheckpointError, match="of w they hold 4 of 8 elements"):
        complete_boxes({0: [upper], 1: [upper]}, wanted, "7-a")


def test_branches_of_a_run_are_not_mixed(saved):
    """The same step of two starts: the later one is taken, whole."""
    tmp_path, states = saved
    program, _ = trained()
    with opened(tmp_path, program) as checkpoints:
        state = on_devices(program, states[2])
        checkpoints.save(4, state, {"position": 64}, persistent=False)
    assert len(list(tmp_path.glob("disk/*/4-*"))) == 2
    _, state = restored(tmp_path, "data=1")
    assert_equal(state, states[2])


def test_a_copied_folder_has_files_of_its_own(saved):
    tmp_path, states = saved
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    step, state = restored(tmp_path, run="copy")
    assert step == 1
    assert_equal(state, states[1])
    assert restored(tmp_path)[0] == 4


def test_writes_that_fail_leave_nothing_and_cost_no_complete_step(saved, monkeypatch):
    tmp_path, states = saved
    program, _ = trained()

    def torn(out, **_):
        out.write(b"half")
        raise OSError(28, "No space left on device")

    with opened(tmp_path, program) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(np, "savez", torn)
            for step in range(5, 9):
                state = on_devices(program, states[1])
                checkpoints.save(step, state, {"position": 16 * step}, persistent=False)
            checkpoints.wait()
    assert not list(tmp_path.glob("disk/*/*/*.partial"))
    assert {3, 4} <= files(tmp_path).keys() <= {2, 3, 4}
    assert restored(tmp_path)[0] == 4
