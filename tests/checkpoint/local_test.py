"""The local tier: checkpoints on the machines' disks, backed by the run's folder."""

import contextlib
import shutil

import numpy as np
import pytest
from checkpoint_test import assert_equal, on_devices, trained
from support.tiny_stack import lower

from meshpar.checkpoint.boxes import Box, assemble_shard, complete_boxes
from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.errors import CheckpointError


def open_checkpoints(tmp_path, program, run="run", disk="disk"):
    return contextlib.closing(
        Checkpoints(
            tmp_path / run / "c", program.portable_state, local_folder=tmp_path / disk
        )
    )


@pytest.fixture
def saved(tmp_path):
    """The states of steps 1 to 4, saved locally, and step 1 in the run's folder."""
    program, states = trained()
    with open_checkpoints(tmp_path, program) as checkpoints:
        for step, state in enumerate(states, 1):
            state, metadata = on_devices(program, state), {"position": 16 * step}
            checkpoints.save(step, state, metadata, persistent=step == 1)
    return tmp_path, dict(enumerate(states, 1))


def restore(tmp_path, layout="data=2", **options):
    program = lower(layout)
    with open_checkpoints(tmp_path, program, **options) as checkpoints:
        restored = checkpoints.restore()
    return restored and (restored.metadata["position"] // 16, restored.state)


def files(tmp_path):
    """{step: file}."""
    paths = tmp_path.glob("disk/*/*/0.npz")
    return {int(file.parent.name.partition("-")[0]): file for file in paths}


@pytest.mark.parametrize("layout", ["fsdp=4,tensor=2", "data=1", "fsdp=8,zero=1"])
def test_the_newest_restores_onto_any_layout(saved, layout):
    tmp_path, states = saved
    assert files(tmp_path).keys() == {2, 3, 4}  # The oldest is deleted.
    step, state = restore(tmp_path, layout)
    assert step == 4
    assert_equal(state, states[4])


@pytest.mark.parametrize("damage", ["truncated", "changed", "partial"])
def test_a_bad_file_is_logged_and_the_step_before_used(saved, damage, caplog):
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
    step, state = restore(tmp_path)
    assert step == 3
    assert_equal(state, states[3])
    times = caplog.text.count(str(file))
    assert times == (damage != "partial"), caplog.text
    assert 4 not in files(tmp_path)  # The run resumes from 3.


def test_the_persistent_copy_is_restored_when_the_disk_is_lost(saved):
    tmp_path, states = saved
    shutil.rmtree(tmp_path / "disk")
    step, state = restore(tmp_path)
    assert step == 1
    assert_equal(state, states[1])


def test_a_new_run_does_not_see_the_files_of_another(saved):
    tmp_path, _ = saved
    assert restore(tmp_path, run="other") is None
    shutil.rmtree(tmp_path / "run")
    assert restore(tmp_path) is None


def test_a_full_disk_is_a_warning(saved, monkeypatch, caplog):
    tmp_path, _ = saved
    program = lower("data=2")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with open_checkpoints(tmp_path, program) as checkpoints:
        monkeypatch.setattr(np, "savez", full)
        checkpoints.save(9, program.init(0), {"position": 144})
    assert "No space left" in caplog.text
    assert restore(tmp_path)[0] == 9  # From the run's own folder.


def test_a_stray_folder_is_neither_read_nor_deleted(saved):
    tmp_path, _ = saved
    newest = files(tmp_path)[4].parent
    strays = [newest.with_name(name) for name in ("my-notes", "99-copy")]
    for stray in strays:
        shutil.copytree(newest, stray)
    assert restore(tmp_path)[0] == 4
    assert all((stray / "0.npz").exists() for stray in strays)


def test_a_file_in_the_place_of_the_runs_folder_is_an_error(saved):
    tmp_path, _ = saved
    folder = files(tmp_path)[4].parent.parent
    shutil.rmtree(folder)
    folder.write_text("")
    with pytest.raises(
        CheckpointError, match="another local_folder= .*--checkpoint_local_dir"
    ):
        restore(tmp_path)


def test_a_shard_is_assembled_from_boxes():
    box = Box("['w']", (0, 4), (2, 3))
    assert Box.parse(str(box)) == box
    assert Box.parse("['step']@+") == Box("['step']", (), ())
    whole = np.arange(24).reshape(4, 6)
    contents = {
        Box("w", (0, 0), (4, 2)): whole[:, :2],
        Box("w", (0, 2), (4, 4)): whole[:, 2:],
    }
    shard = assemble_shard("w", whole, contents, (slice(1, 3), slice(1, 5)))
    np.testing.assert_array_equal(shard, whole[1:3, 1:5])


def test_a_step_is_complete_if_the_disks_together_hold_it():
    leaves = {"w": np.zeros((4, 2))}
    upper, lower_half = "w@0,0+2,2", "w@2,0+2,2"
    boxes = complete_boxes({0: [upper], 1: [upper, lower_half]}, leaves, "7-a")
    assert list(map(str, boxes)) == [upper, lower_half]
    with pytest.raises(CheckpointError, match="of w they hold 4 of 8 elements"):
        complete_boxes({0: [upper], 1: [upper]}, leaves, "7-a")


def test_boxes_of_two_starts_are_not_combined(saved):
    """Of a step that two starts have saved, the later one is restored, whole."""
    tmp_path, states = saved
    program, _ = trained()
    with open_checkpoints(tmp_path, program) as checkpoints:
        state = on_devices(program, states[2])
        checkpoints.save(4, state, {"position": 64}, persistent=False)
    assert len(list(tmp_path.glob("disk/*/4-*"))) == 2
    _, state = restore(tmp_path, "data=1")
    assert_equal(state, states[2])


def test_a_copied_folder_does_not_see_the_local_files_of_its_origin(saved):
    tmp_path, states = saved
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    step, state = restore(tmp_path, run="copy")
    assert step == 1
    assert_equal(state, states[1])
    assert restore(tmp_path)[0] == 4


def test_failed_writes_leave_no_files_and_delete_no_complete_step(saved, monkeypatch):
    tmp_path, states = saved
    program, _ = trained()

    def torn(out, **_):
        out.write(b"half")
        raise OSError(28, "No space left on device")

    with open_checkpoints(tmp_path, program) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(np, "savez", torn)
            for step in range(5, 9):
                state = on_devices(program, states[1])
                checkpoints.save(step, state, {"position": 16 * step}, persistent=False)
            checkpoints.wait()
    assert not list(tmp_path.glob("disk/*/*/*.partial"))
    assert {3, 4} <= files(tmp_path).keys() <= {2, 3, 4}
    assert restore(tmp_path)[0] == 4
