"""Outputs of commands: asks before any work whether a file or folder can be written."""

import errno
import pathlib
import tempfile

from meshpar.errors import ConfigError, shown
from meshpar.settings import Path


def check_file(path: str, flag: str) -> None:
    """Raises ConfigError unless a file can be written; it is not touched.

    Args:
      path: the file, which may exist.
      flag: the flag that gives it, for the message.
    """
    file = pathlib.Path(path)
    try:
        _check_path(path)
        if file.exists():
            file.open("r+b").close()
        else:
            _write_probe(file.parent)
    except OSError as error:
        raise _cannot_write(f"{flag}={path}", error, "file") from error


def check_folder(path: str | pathlib.Path, flag: str) -> None:
    """Raises ConfigError unless a folder can be made and written to; it is not made.

    Args:
      path: the folder, which may exist.
      flag: the flag that gives it, for the message.
    """
    folder = pathlib.Path(path).absolute()
    try:
        _check_path(str(path))
        while not folder.exists():
            folder = folder.parent
        _write_probe(folder)
    except OSError as error:
        raise _cannot_write(f"{flag}={path}", error, "folder") from error


def _check_path(path: str) -> None:
    if problem := Path().problem(path):
        raise OSError(errno.ENAMETOOLONG, problem)


def _write_probe(folder: pathlib.Path) -> None:
    # On Linux such a file has no name, so nothing is left, even after a kill.
    tempfile.TemporaryFile(dir=folder).close()


def _cannot_write(what: str, error: OSError, kind: str) -> ConfigError:
    return ConfigError(
        f"{shown(what)} cannot be written: {error.strerror}; choose another {kind}"
    )
