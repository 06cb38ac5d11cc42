"""Corpus: one stream of token ids, split into a training and a held-out part."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import numpy as np

from experiments.data import fingerprint
from experiments.data.files import (
    MAX_VOCABULARY,
    SEPARATOR,
    TOKEN_SUFFIXES,
    TokenIds,
    Tokens,
    blocks,
    check_regular,
    find_files,
    read_documents,
    read_tokens,
    standard_library,
)
from experiments.data.row_files import READERS, read_rows, suffix_of
from experiments.data.steady_file import SteadyFile
from experiments.data.tokenizers import (
    Decode,
    decode_bytes,
    decode_ids,
    hash_of,
    load_tokenizer,
)
from meshpar.errors import DataError
from meshpar.settings import Number, Path, Switch, Text, real

TOKENIZER = "tokenizer"
"""Key of the hash of a run's tokenizer.json in its checkpoints."""

_HELD_OUT = real(0, 1, note="a fraction of the tokens", above=True, below=True)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The data of a run.

    Attributes:
      path: the data: text, or rows as JSON lines, parquet or csv (a file, a folder or a
        glob), or a .npy or .bin file of token ids; empty for the text of Python's
        standard library.
      tokenizer: a tokenizer.json of Hugging Face; empty for bytes.
      held_out: fraction of the tokens that is kept for evaluation.
      pack: whether a sample holds whole documents, which do not see each other; else it
        is a window of the stream of all tokens.
      separator: token id that ends a document of a file of token ids; -1 for none.
      field: name of the field with the text of a row, which is one document.
    """

    path: Annotated[str, Path()] = ""
    tokenizer: Annotated[str, Path()] = ""
    held_out: Annotated[float, _HELD_OUT] = 0.05
    pack: Annotated[bool, Switch()] = False
    separator: Annotated[int, Number(-1, MAX_VOCABULARY, "", "-1 for none")] = -1
    field: Annotated[str, Text(1000)] = "text"

    @property
    def tokenizer_identity(self) -> dict[str, str]:
        """{"tokenizer": hash of its file}; {} for bytes and for token ids.

        Raises:
          DataError: the file cannot be read.
        """
        return {TOKENIZER: hash_of(self.tokenizer)} if self.tokenizer else {}

    def check_tokenizer(self, stored: Mapping[str, Any]) -> None:
        """Raises DataError where a tokenizer.json is not that of a checkpoint.

        Args:
          stored: metadata of the checkpoint; an earlier version's lack the hash.
        """
        for name, now in self.tokenizer_identity.items():
            if stored.get(name, now) != now:
                raise DataError(
                    f"{self.tokenizer} is not the file with which the run was "
                    "trained: its token ids may mean other texts; restore it, or name "
                    "another place of it by --tokenizer=FILE"
                )


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A stream of token ids, split into a training and a held-out part.

    Attributes:
      name: the path of the data, or a description.
      train: token ids, integer [tokens].
      held_out: token ids, integer [tokens].
      vocab: number of token ids, padded so that it divides over devices.
      decode: token ids -> text.
      train_starts: places in `train` where documents start, ascending; None if samples
        are windows of the stream.
      held_out_starts: those in `held_out`.
      file: the file that holds exactly these token ids, if there is one.
    """

    name: str
    train: Tokens
    held_out: Tokens
    vocab: int
    decode: Decode
    train_starts: np.ndarray | None = None
    held_out_starts: np.ndarray | None = None
    file: SteadyFile | None = None

    @functools.cached_property
    def train_counts(self) -> np.ndarray:
        """Counts of each token id in the training part, integer [ids]."""
        return _counts(self.train)

    @functools.cached_property
    def held_out_counts(self) -> np.ndarray:
        """Counts of each token id in the held-out part, integer [ids]."""
        return _counts(self.held_out)

    @functools.cached_property
    def highest_id(self) -> int:
        """The largest token id that occurs in either part."""
        return max(map(_highest, self._parts))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of sizes, vocabulary and all tokens."""
        return fingerprint.of_all_tokens(self.vocab, self._parts, self.file)

    def has_fingerprint(self, text: str) -> bool:
        """Whether a fingerprint, possibly of an earlier version, is of this data."""
        if text.startswith(fingerprint.WHOLE):
            return text == self.fingerprint
        return text == fingerprint.of_a_sample(self.vocab, self._parts)

    @property
    def _parts(self) -> tuple[Tokens, Tokens]:
        return self.train, self.held_out


def _counts(tokens: Tokens) -> np.ndarray:
    """Counts of token ids, integer [ids]."""
    counts = np.zeros(0, np.int64)
    for block in blocks(tokens):
        more = np.bincount(block.astype(np.int64), minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    return counts


def _highest(tokens: Tokens) -> int:
    """The largest token id; -1 without any."""
    return max((int(block.max()) for block in blocks(tokens)), default=-1)


def _split(tokens: Tokens, place: int) -> tuple[Tokens, Tokens]:
    """The tokens before and from a place on; a file is read later."""
    before, after = slice(place), slice(place, None)
    if isinstance(tokens, TokenIds):
        return tokens.part(before), tokens.part(after)
    return tokens[before], tokens[after]


def load(config: DataConfig) -> Corpus:
    """Reads the data of a run.

    Raises:
      DataError: missing, empty, binary or unreadable data, or a bad tokenizer.
    """
    file = None
    if pathlib.Path(config.path).suffix in TOKEN_SUFFIXES:
        tokens, starts, vocab, decode = _token_ids(config)
        file = tokens.file
    else:
        if config.separator >= 0:
            raise DataError(
                f"data.separator={config.separator} is for files of token ids; leave "
                "it out, as every text file and every row is a document"
            )
        tokens, starts, vocab, decode = _text(config)
    name = config.path or "Python's standard library"
    num_train = len(tokens) - int(len(tokens) * config.held_out)
    padded = -(-vocab // 128) * 128
    parts = _split(tokens, num_train)
    of_parts: tuple[np.ndarray | None, ...] = (None, None)
    if config.pack:
        of_parts = starts[starts < num_train], starts[starts > num_train] - num_train
        of_parts = of_parts[0], np.append(0, of_parts[1])
    return Corpus(name, *parts, padded, decode, *of_parts, file)


_Stream = tuple[Tokens, np.ndarray, int, Decode]
"""Tokens, places where documents start, size of the vocabulary, and decoder."""


def _token_ids(config: DataConfig) -> _Stream:
    """The stream of a file of token ids."""
    if config.tokenizer:
        raise DataError(
            f"--tokenizer={config.tokenizer} with token ids ({config.path}): leave one "
            "of them out"
        )
    file, separator = _token_file(config.path), config.separator
    tokens, starts = read_tokens(file), np.zeros(1, np.int64)
    if separator >= 0:
        ends = _places(tokens, separator)
        if not len(ends):
            raise DataError(
                f"data.separator={separator} does not occur in {file}; give the token "
                "id that ends its documents"
            )
        starts = np.append(starts, ends[ends < len(tokens) - 1] + 1)
    elif config.pack:
        raise DataError(
            f"data.pack=True: {file} does not say where documents end; give the token "
            "id that ends them as data.separator"
        )
    return tokens, starts, _highest(tokens) + 1, decode_ids


def _places(tokens: Tokens, token: int) -> np.ndarray:
    """The places of a token id, ascending, integer [places]."""
    found, start = [], 0
    for block in blocks(tokens):
        found.append(start + np.flatnonzero(block == token))
        start += len(block)
    return np.concatenate(found)


def _token_file(path: str) -> pathlib.Path:
    """The one file of token ids that a path or a glob names."""
    check_regular(pathlib.Path(path), "--data")
    files = find_files(path)
    if len(files) > 1:
        raise DataError(
            f"--data={path} names {len(files)} files of token ids; give one file"
        )
    return files[0]


def _text(config: DataConfig) -> _Stream:
    """The stream of text files or of files of rows."""
    documents = _documents(config)
    if config.tokenizer:
        return _tokenize(documents, config.tokenizer)
    tokens = np.frombuffer(SEPARATOR.join(documents), np.uint8)
    starts = _starts(len(text) + len(SEPARATOR) for text in documents)
    return tokens, starts, 256, decode_bytes


def _documents(config: DataConfig) -> list[bytes]:
    """The documents of text files or of files of rows.

    Raises:
      DataError: files of both kinds, or of two kinds of rows.
    """
    files = find_files(config.path) if config.path else standard_library()
    kinds = {READERS.get(suffix_of(file)): file for file in files}
    if len(kinds) > 1:
        first, second, *_ = sorted(kinds.values())
        raise DataError(
            f"--data={config.path} names files of {len(kinds)} kinds, such as {first} "
            f"and {second}; give a glob of one kind, such as "
            f"'{first.parent}/*{first.suffix}'"
        )
    return read_documents(files) if None in kinds else read_rows(files, config.field)


def _starts(sizes: Iterable[int]) -> np.ndarray:
    """Places where documents of some sizes start, integer [documents]."""
    ends = np.cumsum(np.fromiter(sizes, np.int64))
    return np.append(0, ends[:-1])


def _tokenize(documents: list[bytes], path: str) -> _Stream:
    """The stream of documents under a tokenizer.json."""
    tokenizer = load_tokenizer(path)
    try:
        texts = [document.decode("utf-8") for document in documents]
    except UnicodeDecodeError as error:
        raise DataError(
            f"--tokenizer={path} needs UTF-8 text: {error}; convert the files, or "
            "leave --tokenizer out"
        ) from error
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    tokens = np.concatenate([np.array(e.ids, np.int32) for e in encodings])
    size = tokenizer.get_vocab_size()
    if len(tokens) and (highest := int(tokens.max())) >= size:
        raise DataError(
            f"--tokenizer={path} has a vocabulary of {size} and gives the token id "
            f"{highest}, as its ids have gaps; number its tokens from 0 to {size - 1}"
        )
    return tokens, _starts(len(e.ids) for e in encodings), size, tokenizer.decode


def unigram_loss(corpus: Corpus) -> float:
    """Held-out loss of the best model that ignores context, in nats per token.

    Token frequencies are counted in the training part, with one added to each count.
    NaN without held-out tokens.
    """
    counts, held_out = np.ones(corpus.vocab), corpus.held_out_counts
    if not held_out.sum():
        return math.nan
    counts[: len(corpus.train_counts)] += corpus.train_counts
    log_probabilities = np.log(counts / counts.sum())
    loss = -np.sum(held_out * log_probabilities[: len(held_out)]) / held_out.sum()
    return float(loss)
