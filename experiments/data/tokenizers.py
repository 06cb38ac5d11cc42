"""Tokenizers: text to token ids and back, as the data of a run has them."""

import hashlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.data.files import TOKEN_SUFFIXES, check_regular
from experiments.data.steady_file import read_whole
from meshpar.errors import DataError, shown

Decode = Callable[[Sequence[int]], str]
"""Token ids -> text."""


class Tokenizer(NamedTuple):
    """A tokenizer.

    Attributes:
      encode: text -> token ids, without special tokens.
      decode: token ids -> text.
    """

    encode: Callable[[str], list[int]]
    decode: Decode


def decode_bytes(ids: Sequence[int]) -> str:
    """The text of bytes."""
    return bytes(ids).decode("utf-8", "replace")


def decode_ids(ids: Sequence[int]) -> str:
    """Token ids as text, split by spaces."""
    return " ".join(map(str, ids))


def _encode_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()]
    except ValueError as error:
        raise DataError(
            f"{shown(text)!r}: the data of the run are token ids; write numbers, split "
            "by spaces"
        ) from error


def tokenizer_of(data_path: str, file: str) -> Tokenizer:
    """The tokenizer of a run.

    Args:
      data_path: path of its data.
      file: its tokenizer.json; empty for bytes.

    Raises:
      DataError: the file cannot be read.
    """
    if file:
        loaded = load_tokenizer(file)
        return Tokenizer(
            lambda text: loaded.encode(text, add_special_tokens=False).ids,
            loaded.decode,
        )
    if pathlib.Path(data_path).suffix in TOKEN_SUFFIXES:
        return Tokenizer(_encode_ids, decode_ids)
    return Tokenizer(lambda text: list(text.encode()), decode_bytes)


def hash_of(path: str) -> str:
    """A hash of a tokenizer.json.

    Raises:
      DataError: the file cannot be read.
    """
    try:
        return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()[:32]
    except OSError as error:
        raise DataError(
            f"--tokenizer={path} cannot be read: {error.strerror}; give a "
            "tokenizer.json of Hugging Face's tokenizers"
        ) from error


def load_tokenizer(path: str) -> Any:
    """A tokenizer of Hugging Face's library.

    Raises:
      DataError: the file cannot be read.
    """
    import tokenizers

    check_regular(pathlib.Path(path), "--tokenizer")
    try:
        with read_whole(pathlib.Path(path)):
            return tokenizers.Tokenizer.from_file(path)
    except DataError:
        raise
    except Exception as error:  # The library raises bare Exception.
        raise DataError(
            f"--tokenizer={path} cannot be read: {error}; give a tokenizer.json of "
            "Hugging Face's tokenizers"
        ) from error
