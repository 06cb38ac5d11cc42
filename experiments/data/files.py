"""Files of a corpus: finds text files and token files, and reads them strictly."""

import glob
import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Sequence

import numpy as np

from meshpar.errors import MeshparError, nearest

SEPARATOR = b"\0"
"""Separates documents; no text file contains this byte."""

TOKEN_SUFFIXES = (".npy", ".bin")
"""Suffixes of files that hold token ids instead of text."""
_LARGEST_ID = 2**31 - 1
"""Largest int32, the type of token ids in batches."""


class DataError(MeshparError):
    """Data that cannot be read or is too small, with the remedy."""


def standard_library() -> list[pathlib.Path]:
    """The Python sources of the standard library, without its tests."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    return [
        path
        for path in root.rglob("*.py")
        if not skip.intersection(path.relative_to(root).parts)
    ]


def find_files(path: str) -> list[pathlib.Path]:
    """The files that `--data=PATH` names: one file, a folder's, or a glob's.

    Hidden files and folders are left out of a folder.

    Raises:
      DataError: no such file; names the nearest one.
    """
    target = pathlib.Path(path)
    if glob.has_magic(path):
        matches = [pathlib.Path(match) for match in glob.glob(path, recursive=True)]
        files = [match for match in matches if match.is_file()]
        if not files:
            raise DataError(f"no file matches --data={path}")
        return files
    if target.is_dir():
        files = [
            file
            for file in target.rglob("*")
            if file.is_file()
            and not any(part.startswith(".") for part in file.relative_to(target).parts)
        ]
        if not files:
            raise DataError(f"--data={path}: the folder holds no file")
        return files
    if not target.exists():
        parent = target.parent
        names = os.listdir(parent) if parent.is_dir() else []
        hint = f" ({nearest(target.name, names[:50])})" if names else ""
        raise DataError(f"--data={path} does not exist{hint}")
    return [target]


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
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        if SEPARATOR in content:
            raise DataError(
                f"{path} looks binary (it contains a zero byte); give text files, a "
                "glob such as 'folder/*.txt', or token ids as .npy or .bin"
            )
        if content.strip():
            documents.append(content)
    if not documents:
        raise DataError(f"{len(files)} file(s) such as {files[0]}: all are empty")
    return sorted(documents, key=lambda text: hashlib.sha256(text).digest())


def read_tokens(path: pathlib.Path) -> np.ndarray:
    """Memory-maps token ids: .npy (one dim, integer) or .bin (little-endian uint16).

    Returns:
      Token ids, integer [tokens].

    Raises:
      DataError: an array of another kind, no tokens, or ids that no model takes.
    """
    try:
        if path.suffix == ".npy":
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            tokens = np.memmap(path, dtype="<u2", mode="r")
    except (OSError, ValueError) as error:
        kind = "uint16 token ids" if path.suffix == ".bin" else "an array"
        raise DataError(f"{path} cannot be read as {kind}: {error}") from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(
            f"{path} holds {tokens.dtype}{list(tokens.shape)}; give integer token ids "
            "in one dim"
        )
    if not len(tokens):
        raise DataError(f"{path} holds no tokens")
    if (lowest := int(tokens.min())) < 0:
        raise DataError(f"{path} holds the token id {lowest}; ids start at 0")
    if (highest := int(tokens.max())) > _LARGEST_ID:
        raise DataError(
            f"{path} holds the token id {highest}, beyond every vocabulary; use ids up "
            f"to {_LARGEST_ID}"
        )
    return tokens
