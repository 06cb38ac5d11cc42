"""Disk checks: whether a folder can be written to and has room for a checkpoint."""

import pathlib
import shutil

import jax

from meshpar.errors import CheckpointError


def check_writable(folder: pathlib.Path, argument: str, flag: str) -> None:
    """Makes a folder if it is missing, and writes a probe file to it.

    Args:
      folder: the folder.
      argument: of `Checkpoints`, which names the folder, for the error.
      flag: of a command, which names it as well.

    Raises:
      CheckpointError: the folder cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{jax.process_index()}"
        probe.write_bytes(b"meshpar")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"cannot write to {folder}: {error.strerror}; choose another {argument}= "
            f"(a command: {flag})"
        ) from error


def lack_of_space(folder: pathlib.Path, num_bytes: int) -> str:
    """The free and the needed bytes, if a disk is too full; "" if it has room."""
    free = shutil.disk_usage(folder).free
    if free >= num_bytes:
        return ""
    return (
        f"{folder} has {free} bytes free, and one checkpoint takes about {num_bytes}; "
        "free some space"
    )
