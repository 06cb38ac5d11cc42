"""Write problems: why a checkpoint could not be written, and the remedy."""

import pathlib
import shutil
from collections.abc import Sequence

from meshpar.errors import CheckpointError, MeshparError
from meshpar.multihost import MissingError
from meshpar.multihost.watchdog import HUNG


class StalledWriteError(CheckpointError):
    """A checkpoint that took too long to write; a launcher may start the run again."""

    exit_code = HUNG


_NO_ROOM = ("No space left", "File too large", "quota", "RESOURCE_EXHAUSTED")
_GONE = ("No such file", "NOT_FOUND", "Stale file handle")
_LOST = ("Barrier failed", "Barrier timed out", "oordination", "heartbeat")


def check_present(folder: pathlib.Path) -> None:
    """Looks for the folder of checkpoints, which orbax would make anew.

    Raises:
      CheckpointError: it is gone.
    """
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint can be written: {_gone(folder)}")


def failed_write(
    folder: pathlib.Path, error: Exception, steps: Sequence[int]
) -> MeshparError:
    """The error of a failed write, with its cause and the remedy.

    After the loss of another process (`MissingError`), or a write that took too long
    (`StalledWriteError`), the run can start again. Orbax measures that time by the
    clock of the day, which may jump.

    Args:
      folder: holds the checkpoints.
      error: as orbax raised it.
      steps: those of the complete checkpoints.
    """
    text = str(error).split("\n")[0]
    if any(words in text for words in _LOST):
        return MissingError(
            f"another process was lost while a checkpoint was written to {folder}: "
            f"{text}; start the run again"
        )
    # The write itself may have made the folder anew, without what it held.
    held = folder.is_dir() and all((folder / str(step)).is_dir() for step in steps)
    if not held or any(words in text for words in _GONE):
        remedy = _gone(folder)
    else:
        remedy = (
            f"run the same command again; complete checkpoints are unchanged: {steps}"
        )
        if any(words in text for words in _NO_ROOM):
            free = shutil.disk_usage(folder).free
            remedy = f"{free} bytes are free there: make room and {remedy}"
    kind = StalledWriteError if isinstance(error, TimeoutError) else CheckpointError
    return kind(f"writing a checkpoint to {folder} failed: {text}; {remedy}")


def _gone(folder: pathlib.Path) -> str:
    return (
        f"{folder}, or a part of it, was removed or its disk is away; mount or restore "
        "it and run the same command again"
    )
