"""Batches: shuffled samples of a corpus, from one global position on (grain).

The stream of tokens is cut into windows, or its documents are packed into samples
(`packing`); they are shuffled anew in every epoch. Sample
i of a run is a pure function of (data, seed, i): the position of the data is one number
that does not depend on the number of processes.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from experiments.data.corpus import Corpus
from experiments.data.files import Tokens
from experiments.data.packing import PackedSamples
from meshpar.errors import DataError
from meshpar.runs.data import HeldOut, Place
from meshpar.runs.samples import batches_of, shuffled, spread_batches


class Windows:
    """Windows of length + 1 tokens that overlap by one: inputs and next tokens."""

    def __init__(self, tokens: Tokens, length: int):
        self._tokens = tokens
        self._length = length

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._length)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        start = i * self._length
        window = np.asarray(self._tokens[start : start + self._length + 1], np.int32)
        return {"tokens": window[:-1], "targets": window[1:]}


def _samples(
    tokens: Tokens, starts: np.ndarray | None, length: int
) -> Windows | PackedSamples:
    """The samples of one part of a corpus."""
    if starts is None:
        return Windows(tokens, length)
    return PackedSamples(tokens, starts, length)


def training_batches(
    corpus: Corpus,
    *,
    length: int,
    batch_size: int,
    seed: int,
    rows: Sequence[int],
    position: int,
) -> Iterator[dict[str, np.ndarray]]:
    """Yields this process's rows of every training batch, without end.

    Args:
      corpus: the data.
      length: tokens per sample.
      batch_size: samples per batch, over all processes.
      seed: seed of the shuffle.
      rows: rows of the batch that this process holds, ascending.
      position: number of samples that the run has used before.

    Returns:
      Batches {"tokens", "targets"}, int32 [rows, length], or those of `PackedSamples`.

    Raises:
      DataError: fewer samples than one batch needs.
    """
    source = _samples(corpus.train, corpus.train_starts, length)
    if len(source) < batch_size:
        raise DataError(
            f"the training part of the data has {len(source)} samples of {length} "
            f"tokens, fewer than one batch of {batch_size}; give more text, a smaller "
            "--batch_size or a smaller model.length"
        )
    place = Place(batch_size, rows, seed, position)
    return batches_of(shuffled(source, seed), place)


def held_out_batches(
    corpus: Corpus, *, length: int, batch_size: int, rows: Sequence[int], limit: int
) -> HeldOut:
    """The held-out part, each sample once; or `limit` batches, spread evenly over more.

    Args:
      corpus: the data.
      length: tokens per sample.
      batch_size: samples per batch, over all processes.
      rows: rows of the batch that this process holds, ascending.
      limit: largest number of batches.

    Returns:
      Batches as in `training_batches`.

    Raises:
      DataError: not one sample.
    """
    source = _samples(corpus.held_out, corpus.held_out_starts, length)
    if not len(source):
        raise DataError(
            f"the held-out part of the data has no sample of {length} tokens; give "
            "more text, or a smaller model.length"
        )
    return spread_batches(source, Place(batch_size, rows), limit)


def padded_unevenly(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The batch with weights, as if its first rows were much shorter than its last.

    Parts of the batch then have unequal weights, over devices and over microbatches.

    Args:
      batch: {"tokens", "targets"}, int32 [rows, length].

    Returns:
      The batch and "weights", float32 [rows, length]: 1 for tokens, 0 for padding.
    """
    rows, length = batch["tokens"].shape
    lengths = 1 + np.arange(rows) * (length - 1) // max(1, rows - 1)
    is_token = np.arange(length)[None] < lengths[:, None]
    weights = batch.get("weights", np.float32(1)) * is_token
    return batch | {"weights": weights.astype(np.float32)}
