"""Writes that fail: one error with the cause and its remedy, and nothing beside it."""

import contextlib
import resource
import shutil

import pytest
from checkpoint_test import on_devices, restore, trained

from meshpar.checkpoint import write_problems
from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.errors import CheckpointError
from meshpar.multihost import HUNG, MissingError


@pytest.fixture
def checkpoints(tmp_path):
    """Checkpoints of step 1, and the state of step 2 on devices."""
    program, states = trained()
    opened = Checkpoints(tmp_path / "c", program.portable_state)
    opened.save(1, on_devices(program, states[0]), {"position": 16})
    opened.wait()
    return opened, on_devices(program, states[1])


@contextlib.contextmanager
def full_disk():
    """Files may not grow: writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_error(checkpoints, caplog, tmp_path):
    opened, state = checkpoints
    with full_disk(), pytest.raises(CheckpointError) as raised:
        opened.save(2, state, {"position": 32})
        opened.wait()
    for words in (
        "File too large",
        "bytes are free there: make room",
        "unchanged: [1]",
    ):
        assert words in str(raised.value)
    assert caplog.records == []
    assert "\n" not in str(raised.value)
    assert restore(tmp_path / "c")[1][1] == {"position": 16}


def test_a_folder_that_was_removed_is_not_made_anew(checkpoints, tmp_path):
    """An orbax manager would make it, below the place of a bucket that is away."""
    opened, state = checkpoints
    (tmp_path / "c").rename(tmp_path / "away")
    with pytest.raises(CheckpointError, match="removed or its disk is away; mount"):
        opened.save(2, state, {"position": 32})
    assert not (tmp_path / "c").exists()


def test_a_folder_that_is_removed_during_a_write_is_one_error(
    checkpoints, caplog, tmp_path
):
    opened, state = checkpoints
    for step in range(2, 12):
        opened.save(step, state, {"position": 32})
        away = (tmp_path / "c").rename(tmp_path / "away")
        try:
            opened.wait()
        except CheckpointError as error:
            text = str(error)
            break
        # This write was complete before, or its last files made the folder anew.
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        away.rename(tmp_path / "c")
    assert "mount or restore" in text
    assert "make room" not in text
    assert caplog.records == []


@pytest.mark.parametrize(
    "text, remedy",
    [
        ("No space left on device", "make room and run"),
        ("RESOURCE_EXHAUSTED: quota", "make room and run"),
        ("[Errno 2] No such file or directory: 'x'", "mount or restore"),
        ("PERMISSION_DENIED: x", "failed: PERMISSION_DENIED: x; run the same"),
    ],
)
def test_each_cause_has_its_remedy(text, remedy, tmp_path):
    (tmp_path / "1").mkdir()
    error = write_problems.failed_write(tmp_path, ValueError(text), [1])
    assert remedy in str(error)
    assert ("make room" in str(error)) == ("make room" in remedy)


def test_a_write_that_took_too_long_lets_the_run_start_again(tmp_path):
    (tmp_path / "1").mkdir()
    slow = TimeoutError("ChainedFuture timed out after 34560000.03 seconds.")
    error = write_problems.failed_write(tmp_path, slow, [1])
    assert error.exit_code == HUNG and "run the same command again" in str(error)
    other = write_problems.failed_write(tmp_path, ValueError("broken"), [1])
    assert not hasattr(other, "exit_code")


def test_a_folder_that_the_write_made_anew_is_not_said_to_be_unchanged(tmp_path):
    error = write_problems.failed_write(tmp_path, ValueError("No ArrayMetadata"), [1])
    assert "mount or restore" in str(error) and "unchanged" not in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "INTERNAL: Barrier failed because: task is set to ERROR: UNAVAILABLE: Task 1",
        "UNAVAILABLE: Task 1 heartbeat timeout",
        "DEADLINE_EXCEEDED: Barrier timed out. Id: a::1",
    ],
)
def test_a_process_lost_during_a_write_lets_the_run_start_again(text, tmp_path):
    error = write_problems.failed_write(tmp_path, RuntimeError(text), [1])
    assert isinstance(error, MissingError) and error.exit_code == HUNG
    assert "another process was lost" in str(error) and text in str(error)
