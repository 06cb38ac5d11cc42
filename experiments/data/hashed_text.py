"""Hashed text: rows of a sparse matrix, one for every few lines of text files.

A row holds the words of its lines and all pairs of neighbouring words, each hashed to a
feature of value 1. Its label says whether it is from the folder that most rows are from
(or the file, where files are in no folder). It is a problem of many rows and features
that needs no download.
"""

import collections
import dataclasses
import pathlib
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import scipy.sparse as sp

from experiments.data.files import find_files
from meshpar.errors import DataError

STANDARD_LIBRARY = "stdlib"
"""The word for the Python sources of the standard library, with its tests."""

LINES_PER_ROW = 10
FEWEST_WORDS = 5
"""Lines with fewer words in all make no row."""

_WORD = re.compile(r"[A-Za-z_]\w+")


@dataclasses.dataclass(frozen=True)
class HashedText:
    """Rows of hashed text.

    Attributes:
      name: the data, and what a label of 1 means.
      rows: float32 [rows, features], 1 for each feature of a row.
      labels: float32 [rows], 1 or -1.
    """

    name: str
    rows: sp.csr_array
    labels: np.ndarray


def load(path: str, hash_bits: int, max_rows: int = 0, seed: int = 0) -> HashedText:
    """Reads text files into rows of hashed words.

    Args:
      path: "stdlib", a folder or a glob, with two folders or files at the top.
      hash_bits: there are 2**hash_bits features.
      max_rows: as many rows are drawn; 0 for all.
      seed: of the rows that are drawn.

    Raises:
      DataError: there are no such files, or all rows are from the same one.
    """
    files, root = _files(path)
    owners: list[str] = []
    columns: list[np.ndarray] = []
    for file in files:
        owner = file.relative_to(root).parts[0]
        for words in _chunks(file):
            columns.append(_features(words, hash_bits))
            owners.append(owner)
    counts = collections.Counter(owners)
    if len(counts) < 2:
        raise DataError(
            f"--data={path}: all {len(owners):,} rows of text come from one file or "
            "folder, so there is nothing to tell apart; give a folder of folders, or "
            "stdlib"
        )
    positive = min(counts, key=lambda owner: (-counts[owner], owner))
    chosen = np.arange(len(owners))
    if 0 < max_rows < len(owners):
        rng = np.random.default_rng(seed)
        chosen = np.sort(rng.choice(len(owners), max_rows, replace=False))
    starts = np.cumsum([0, *(len(columns[row]) for row in chosen)])
    indices = np.concatenate([columns[row] for row in chosen])
    ones = np.ones(len(indices), np.float32)
    shape = (len(chosen), 2**hash_bits)
    rows = sp.csr_array((ones, indices, starts.astype(np.int32)), shape)
    labels = [1 if owners[row] == positive else -1 for row in chosen]
    name = f"{path}: {len(chosen):,} rows, is a row from {positive}?"
    return HashedText(name, rows, np.array(labels, np.float32))


def split(text: HashedText, held_out: float, seed: int) -> list[HashedText]:
    """Draws the rows that are held out; returns those to train on, then these.

    Args:
      text: all rows.
      held_out: share of the rows that is held out.
      seed: of the draw.
    """
    chosen = np.random.default_rng(seed).random(len(text.labels)) < held_out
    parts = np.flatnonzero(~chosen), np.flatnonzero(chosen)
    return [HashedText(text.name, text.rows[p], text.labels[p]) for p in parts]


def _files(path: str) -> tuple[list[pathlib.Path], pathlib.Path]:
    """The files in order, and the folder that holds all of them."""
    if path == STANDARD_LIBRARY:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        skip = {"site-packages", "dist-packages"}
        files = [
            file
            for file in root.rglob("*.py")
            if not skip.intersection(file.relative_to(root).parts)
        ]
        return sorted(files), root
    files = sorted(file.absolute() for file in find_files(path))
    parents = [file.parent.parts for file in files]
    shared = 0
    while all(len(p) > shared and p[shared] == parents[0][shared] for p in parents):
        shared += 1
    return files, pathlib.Path(*parents[0][:shared])


def _chunks(file: pathlib.Path) -> Iterator[list[str]]:
    """The words of every few lines of a file."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(
            f"{file} cannot be read: {error.strerror}; give files that you may read"
        ) from error
    for start in range(0, len(lines), LINES_PER_ROW):
        words = _WORD.findall("\n".join(lines[start : start + LINES_PER_ROW]))
        if len(words) >= FEWEST_WORDS:
            yield words


def _features(words: Sequence[str], hash_bits: int) -> np.ndarray:
    """The features of a row, ascending, each once."""
    pairs = (
        f"{first} {second}" for first, second in zip(words, words[1:], strict=False)
    )
    texts = {*words, *pairs}
    hashes = {zlib.crc32(text.encode()) % 2**hash_bits for text in texts}
    return np.array(sorted(hashes), np.int32)
