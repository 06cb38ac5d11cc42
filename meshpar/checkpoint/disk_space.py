"""Whether a folder can take a checkpoint."""

import pathlib
import shutil

import jax

from meshpar.errors import CheckpointError


def check_writable(folder: pathlib.Path, flag: str) -> None:
    """Raises CheckpointError unless a folder can be written to.

    Args:
      folder: made if it is missing.
      flag: what names the folder, for the remedy.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{jax.process_index()}"
        probe.write_bytes(b"meshpar")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"cannot write to {folder}: {error.strerror}; choose another {flag}"
        ) from error


def lack_of_space(folder: pathlib.Path, num_bytes: int) -> str:
    """Says so if a folder's disk has no room for so many bytes; "" if it has."""
    free = shutil.disk_usage(folder).free
    if free >= num_bytes:
        return ""
    return (
        f"{folder} has {free} bytes free, and one checkpoint takes about {num_bytes}; "
        "free some space"
    )
