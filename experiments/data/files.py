"""Files of a corpus: finds text files and token files, and reads them strictly."""

import glob
import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Iterator, Sequence

import numpy as np

from experiments.data.steady_file import SteadyFile, read_whole
from meshpar.errors import DataError, nearest

SEPARATOR = b"\0"
"""Separates documents; no text file contains this byte."""

TOKEN_SUFFIXES = (".npy", ".bin")
"""Suffixes of files that hold token ids instead of text."""

MAX_VOCABULARY = 2**24
"""Most token ids of a vocabulary."""

_BLOCK = 1 << 22
"""Token ids that are read at once where all are read."""


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
            with read_whole(path):
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


class TokenIds:
    """Token ids in a file, or a part of them, which are read when they are indexed.

    Attributes:
      file: the file.
      dtype: of the ids in the file, an integer.
    """

    def __init__(self, file: SteadyFile, dtype: np.dtype, offset: int, size: int):
        """A part of a file.

        Args:
          file: the file.
          dtype: of the ids.
          offset: the byte at which the part begins.
          size: number of ids.
        """
        self.file, self.dtype = file, dtype
        self._offset, self._size = offset, size

    def __len__(self) -> int:
        return self._size

    def _place(self, part: slice) -> tuple[int, int]:
        """(the first byte, number of ids) of a part."""
        start, stop, step = part.indices(self._size)
        if step != 1:
            raise IndexError(f"a step of {step}: token ids are read one after another")
        return self._offset + start * self.dtype.itemsize, max(0, stop - start)

    def __getitem__(self, part: slice) -> np.ndarray:
        """The token ids of a part, integer [tokens].

        Raises:
          DataError: the file is not what it was when it was opened.
        """
        start, size = self._place(part)
        number = part.indices(self._size)[0]
        what = f"the tokens {number:,} to {number + size:,}"
        content = self.file.read(start, size * self.dtype.itemsize, what)
        return np.frombuffer(content, self.dtype)

    def part(self, part: slice) -> "TokenIds":
        """A part, of which nothing is read yet."""
        return TokenIds(self.file, self.dtype, *self._place(part))


Tokens = np.ndarray | TokenIds
"""A stream of token ids, in memory or in a file: integer [tokens]."""


def blocks(tokens: Tokens) -> Iterator[np.ndarray]:
    """The token ids, a block after the other, as they may not fit into memory."""
    for start in range(0, len(tokens), _BLOCK):
        yield tokens[start : start + _BLOCK]


def read_tokens(path: pathlib.Path) -> TokenIds:
    """Opens token ids: .npy (one dim, integer) or .bin (little-endian uint16).

    Returns:
      Token ids, integer [tokens].

    Raises:
      DataError: an array of another kind, no tokens, or ids out of range.
    """
    try:
        file = SteadyFile(path)
        shape, dtype, offset = (file.size // 2,), np.dtype("<u2"), 0
        if path.suffix == ".npy":
            # Its memory map, of which nothing is read, tells where the array begins.
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            shape, dtype, offset = array.shape, array.dtype, array.offset
        elif file.size % 2:
            raise ValueError("its bytes are no whole number of ids")
    except (OSError, ValueError) as error:
        kind = "uint16 token ids" if path.suffix == ".bin" else "an array"
        raise DataError(
            f"{path} cannot be read as {kind}: {error}; give .npy or .bin token ids, "
            "or text under another suffix"
        ) from error
    if len(shape) != 1 or not np.issubdtype(dtype, np.integer):
        raise DataError(
            f"{path} holds {dtype}{list(shape)}; give integer token ids in one dim"
        )
    if not shape[0]:
        raise DataError(f"{path} holds no tokens; give a file of token ids")
    tokens = TokenIds(file, dtype, offset, shape[0])
    if dtype == np.uint16:
        return tokens  # Every id is in range.
    for block in blocks(tokens):
        for found in (int(block.min()), int(block.max())):
            if not 0 <= found < MAX_VOCABULARY:
                raise DataError(
                    f"{path} holds the token id {found}; use ids from 0 to below "
                    f"{MAX_VOCABULARY:,}"
                )
    return tokens
