"""Data: text or token ids -> shuffled, packed windows at one global position (grain).

Documents are joined into one stream of tokens, cut into windows, and shuffled anew in
every epoch. Sample i of the run is a pure function of (data, seed, i), so the whole
position of the data is one number, whatever the number of processes.
"""

import dataclasses
import functools
import glob
import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Callable, Iterator, Sequence

import grain
import numpy as np

from experiments.config import DataConfig
from meshpar.errors import MeshparError, nearest

SEPARATOR = b"\0"
"""Stands between documents; a byte that no text holds."""


class DataError(MeshparError):
    """Data that cannot be read or is too small, with the remedy."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A stream of token ids, split into a training and a held-out part.

    Attributes:
      name: what it is, for people.
      train: token ids, integer [tokens].
      held_out: token ids, integer [tokens].
      vocab: number of token ids, padded so that it divides over devices.
      decode: token ids -> text.
    """

    name: str
    train: np.ndarray
    held_out: np.ndarray
    vocab: int
    decode: Callable[[Sequence[int]], str]

    @functools.cached_property
    def train_counts(self) -> np.ndarray:
        """How often each token id stands in the training part, integer [ids]."""
        return _counts(self.train)

    @functools.cached_property
    def held_out_counts(self) -> np.ndarray:
        """How often each token id stands in the held-out part, integer [ids]."""
        return _counts(self.held_out)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of sizes, vocabulary and a sample of the tokens."""
        digest = hashlib.sha256(f"{self.vocab}".encode())
        for part in (self.train, self.held_out):
            stride = max(1, len(part) // 65536)
            digest.update(f"{len(part)}".encode())
            digest.update(np.ascontiguousarray(part[::stride], np.int64).tobytes())
        return digest.hexdigest()[:16]


def _counts(tokens: np.ndarray) -> np.ndarray:
    """Counts token ids piece by piece: the tokens may be a large mapped file."""
    counts, piece = np.zeros(0, np.int64), 1 << 24
    for start in range(0, len(tokens), piece):
        more = np.bincount(tokens[start : start + piece], minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    return counts


def _standard_library() -> list[pathlib.Path]:
    """The Python sources of the standard library, without its tests."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    return [
        path
        for path in root.rglob("*.py")
        if not skip.intersection(path.relative_to(root).parts)
    ]


def _files(path: str) -> list[pathlib.Path]:
    if glob.has_magic(path):
        found = [pathlib.Path(p) for p in glob.glob(path, recursive=True)]
        found = [p for p in found if p.is_file()]
        if not found:
            raise DataError(f"no file matches --data={path}")
        return found
    target = pathlib.Path(path)
    if target.is_dir():
        found = [
            p
            for p in target.rglob("*")
            if p.is_file()
            and not any(part.startswith(".") for part in p.relative_to(target).parts)
        ]
        if not found:
            raise DataError(f"--data={path}: the folder holds no file")
        return found
    if not target.exists():
        parent = target.parent
        names = os.listdir(parent) if parent.is_dir() else []
        hint = f" ({nearest(target.name, names[:50])})" if names else ""
        raise DataError(f"--data={path} does not exist{hint}")
    return [target]


def _documents(files: Sequence[pathlib.Path]) -> list[bytes]:
    """Contents of text files, in an order that depends on nothing but them."""
    documents = []
    for path in files:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        if SEPARATOR in content:
            raise DataError(
                f"{path} looks binary (it holds a zero byte); give text files, a glob "
                "such as 'folder/*.txt', or token ids as .npy or .bin"
            )
        if content.strip():
            documents.append(content)
    if not documents:
        raise DataError(f"{len(files)} file(s), {files[0]} among them: all are empty")
    return sorted(documents, key=lambda text: hashlib.sha256(text).digest())


def _token_file(path: pathlib.Path) -> np.ndarray:
    """Token ids from .npy (1-D, integer) or .bin (little-endian uint16), mapped."""
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
    if (low := int(tokens.min())) < 0:
        raise DataError(f"{path} holds the token id {low}; ids start at 0")
    return tokens


def _pad(vocab: int) -> int:
    return -(-vocab // 128) * 128


def load(config: DataConfig) -> Corpus:
    """Reads the data of a run.

    Raises:
      DataError: missing, empty, binary or unreadable data, or a bad tokenizer.
    """
    decode: Callable[[Sequence[int]], str]
    suffix = pathlib.Path(config.path).suffix
    if suffix in (".npy", ".bin"):
        if config.tokenizer:
            raise DataError(
                f"--tokenizer={config.tokenizer} with token ids ({config.path}): "
                "leave one of them out"
            )
        tokens = _token_file(_files(config.path)[0])
        vocab, decode = int(tokens.max()) + 1, lambda ids: " ".join(map(str, ids))
    else:
        files = _files(config.path) if config.path else _standard_library()
        documents = _documents(files)
        if config.tokenizer:
            tokens, vocab, decode = _tokenize(documents, config.tokenizer)
        else:
            tokens = np.frombuffer(SEPARATOR.join(documents), np.uint8)
            vocab, decode = 256, lambda ids: bytes(ids).decode("utf-8", "replace")
    name = config.path or "Python's standard library"
    cut = len(tokens) - int(len(tokens) * config.held_out)
    return Corpus(name, tokens[:cut], tokens[cut:], _pad(vocab), decode)


def _tokenize(documents: list[bytes], path: str):
    """Tokens, vocabulary size and decoder of a tokenizer.json."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # The library raises bare Exception.
        raise DataError(f"--tokenizer={path} cannot be read: {error}") from error
    try:
        texts = [document.decode("utf-8") for document in documents]
    except UnicodeDecodeError as error:
        raise DataError(f"--tokenizer needs UTF-8 text: {error}") from error
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    tokens = np.concatenate([np.array(e.ids, np.int32) for e in encoded])
    return tokens, tokenizer.get_vocab_size(), tokenizer.decode


def unigram_loss(corpus: Corpus) -> float:
    """Held-out loss of the best model that ignores context, in nats per token.

    Token frequencies are counted on the training part, plus one each.
    """
    counts, seen = np.ones(corpus.vocab), corpus.held_out_counts
    counts[: len(corpus.train_counts)] += corpus.train_counts
    log_probabilities = np.log(counts / counts.sum())
    return float(-np.sum(seen * log_probabilities[: len(seen)]) / seen.sum())


class Windows(grain.sources.RandomAccessDataSource):
    """Windows of length + 1 tokens that overlap by one: inputs and next tokens."""

    def __init__(self, tokens: np.ndarray, length: int):
        self._tokens = tokens
        self._length = length

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._length)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        start = i * self._length
        window = np.asarray(self._tokens[start : start + self._length + 1], np.int32)
        return {"tokens": window[:-1], "targets": window[1:]}


class _BatchRows(grain.MapDataset):
    """The samples of some rows of every batch, from a global position on."""

    def __init__(self, parent, rows: Sequence[int], batch_size: int, position: int):
        super().__init__(parent)
        self._rows, self._batch_size, self._position = rows, batch_size, position

    def __len__(self) -> int:
        return (
            (len(self._parent) - self._position) // self._batch_size * len(self._rows)
        )

    def __getitem__(self, i: int):
        step, row = divmod(i, len(self._rows))
        index = self._position + step * self._batch_size + int(self._rows[row])
        return self._parent[index]


def _check_size(windows: Windows, part: str, batch_size: int, length: int) -> None:
    if len(windows) < batch_size:
        raise DataError(
            f"the {part} part of the data has {len(windows)} windows of {length} "
            f"tokens, fewer than one batch of {batch_size}; give more text, a smaller "
            "--batch_size or a smaller model.length"
        )


def training_batches(
    corpus: Corpus,
    *,
    length: int,
    batch_size: int,
    seed: int,
    rows: Sequence[int],
    position: int,
) -> Iterator[dict[str, np.ndarray]]:
    """Yields this process's rows of every training batch, for ever.

    Args:
      corpus: the data.
      length: tokens per sample.
      batch_size: samples per batch, over all processes.
      seed: seed of the shuffle.
      rows: rows of the batch that this process holds, ascending.
      position: samples already used by the run.

    Returns:
      Batches {"tokens", "targets"}, int32 [rows, length].
    """
    windows = Windows(corpus.train, length)
    _check_size(windows, "training", batch_size, length)
    samples = grain.MapDataset.source(windows).seed(seed).shuffle().repeat()
    own = _BatchRows(samples, rows, batch_size, position).batch(len(rows))
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return iter(own.to_iter_dataset(options))


def held_out_batches(
    corpus: Corpus, *, length: int, batch_size: int, rows: Sequence[int], limit: int
) -> list[dict[str, np.ndarray]]:
    """At most `limit` batches, spread evenly over the held-out part."""
    windows = Windows(corpus.held_out, length)
    _check_size(windows, "held-out", batch_size, length)
    num = min(limit, len(windows) // batch_size)
    chosen = np.linspace(0, len(windows) - 1, num * batch_size).astype(int)
    batches = []
    for batch in chosen.reshape(num, batch_size):
        samples = [windows[int(batch[row])] for row in rows]
        batches.append({k: np.stack([s[k] for s in samples]) for k in samples[0]})
    return batches
