"""Files of a corpus: finds text files and token files, and reads them strictly."""

import glob
import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Sequence

import numpy as np

from meshpar.errors import DataError, nearest

SEPARATOR = b"\0"
"""Separates documents; no text file contains this byte."""

TOKEN_SUFFIXES = (".npy", ".bin")
"""Suffixes of files that hold token ids instead of text."""

MAX_VOCABULARY = 2**24
"""Most token ids of a vocabulary."""


def standard_library() -> list[pathlib.Path]:
    """The Python sources of the standard library, without its tests."""
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    paths = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in skip]
        here = pathlib.Path(folder)
        paths += [here / name for name in names if name.endswith(".py")]
    return paths


def find_files(path: str) -> list[pathlib.Path]:
    """The files that `--data=PATH` names: one file, a folder's, or a glob's.

    Hidden files and folders are left out of a folder.

    Raises:
      DataError: no such file; names the nearest one. Or a path that is no file, such
        as a pipe, whose text could be read only once.
    """
    target = pathlib.Path(path)
    if glob.has_magic(path):
        matches = [pathlib.Path(match) for match in glob.glob(path, recursive=True)]
        files = [match for match in matches if match.is_file()]
        if not files:
            raise DataError(
                f"no file matches --data={path}; write a pattern such as 'folder/*.txt'"
            )
        return files
    if target.is_dir():
        files = [
            file
            for file in target.rglob("*")
            if file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(target).parts)
        ]
        if not files:
            raise DataError(
                f"--data={path}: the folder holds no file that is not hidden; give a "
                "folder of text files"
            )
        return files
    if not target.exists():
        parent = target.parent
        names = os.listdir(parent) if parent.is_dir() else []
        hint = f" ({nearest(target.name, names[:50])})" if names else ""
        raise DataError(
            f"--data={path} does not exist{hint}; give a file, a folder or a glob"
        )
    check_regular(target, "--data")
    return [target]


def check_regular(path: pathlib.Path, flag: str) -> None:
    """Raises DataError for a path that is neither a file nor missing.

    Args:
      path: the path.
      flag: the flag that gives it, for the message.
    """
    if path.exists() and not path.is_file():
        raise DataError(
            f"{flag}={path} is a folder, a pipe or a device; give a file, in which "
            "the text is stored"
        )


def read_documents(files: Sequence[pathlib.Path]) -> list[bytes]:
    """Contents of text files, ordered by their hash, whatever the files' names.

    Raises:
      DataError: a file that cannot be read or is binary, or only empty files.
    """
    documents = []
    for path in files:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(
                f"cannot read {path}: {error.strerror}; give files that you may read"
            ) from error
        if SEPARATOR in content:
            raise DataError(
                f"{path} looks binary (it contains a zero byte); give text files, a "
                "glob such as 'folder/*.txt', rows as .jsonl or .parquet, or token ids "
                "as .npy or .bin"
            )
        if content.strip():
            documents.append(content)
    if not documents:
        raise DataError(
            f"{len(files)} file(s) such as {files[0]}: all are empty; give files with "
            "text"
        )
    return sorted(documents, key=lambda text: hashlib.sha256(text).digest())


def read_tokens(path: pathlib.Path) -> np.ndarray:
    """Memory-maps token ids: .npy (one dim, integer) or .bin (little-endian uint16).

    Returns:
      Token ids, integer [tokens].

    Raises:
      DataError: an array of another kind, no tokens, or ids out of range.
    """
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            tokens = np.memmap(path, dtype="<u2", mode="r")
    except (OSError, ValueError) as error:
        kind = "uint16 token ids" if path.suffix == ".bin" else "an array"
        raise DataError(
            f"{path} cannot be read as {kind}: {error}; give .npy or .bin token ids, "
            "or text under another suffix"
        ) from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(
            f"{path} holds {tokens.dtype}{list(tokens.shape)}; give integer token ids "
            "in one dim"
        )
    if not len(tokens):
        raise DataError(f"{path} holds no tokens; give a file of token ids")
    if tokens.dtype == np.uint16:
        return tokens  # Every id is in range.
    for found in (int(tokens.min()), int(tokens.max())):
        if not 0 <= found < MAX_VOCABULARY:
            raise DataError(
                f"{path} holds the token id {found}; use ids from 0 to below "
                f"{MAX_VOCABULARY:,}"
            )
    return tokens
