"""The data of a decoder: samples of a corpus for training, others for evaluation."""

import functools
from typing import Any

import jax
import numpy as np

from experiments import data
from meshpar.errors import ConfigError
from meshpar.runs.data import Batches, Data, HeldOut, Place


class TokenData(Data):
    """Samples of one part of a corpus, which is read when it is first needed.

    Attributes:
      config: the data.
      length: tokens of a sample.
      vocab: number of token ids of the model.
    """

    def __init__(
        self,
        config: data.DataConfig,
        length: int,
        vocab: int,
        corpus: data.Corpus | None = None,
    ):
        self.config, self.length, self.vocab = config, length, vocab
        if corpus is not None:
            self.corpus = corpus

    @functools.cached_property
    def corpus(self) -> data.Corpus:
        """The corpus.

        Raises:
          MeshparError: it cannot be read, or has ids that the model has not.
        """
        corpus = data.load(self.config)
        check_vocabulary(corpus, self.vocab)
        return corpus

    @property
    def name(self) -> str:
        """Name and sizes of the corpus."""
        train, held_out = len(self.corpus.train), len(self.corpus.held_out)
        return f"{self.corpus.name}, {train:,} tokens, held out {held_out:,}"

    def abstract_batch(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes of a batch; reads nothing."""
        shape = (batch_size, self.length)
        names = ["tokens", "targets"]
        if self.config.pack:
            names += ["segments", "positions"]
        batch = {name: jax.ShapeDtypeStruct(shape, np.int32) for name in names}
        if self.config.pack:
            batch["weights"] = jax.ShapeDtypeStruct(shape, np.float32)
        return batch

    def _of(self, place: Place) -> dict[str, Any]:
        rows, size = place.rows, place.batch_size
        return dict(length=self.length, batch_size=size, rows=rows)

    def training_batches(self, place: Place) -> Batches:
        seed, position = place.seed, place.position
        batches = data.training_batches(
            self.corpus, seed=seed, position=position, **self._of(place)
        )
        return Batches(batches)

    def evaluation_batches(self, place: Place, limit: int) -> HeldOut:
        """Batches of the part that is held out."""
        of = self._of(place)
        return data.held_out_batches(self.corpus, limit=limit, **of)

    @property
    def fingerprint(self) -> str:
        """A fingerprint of all tokens."""
        return self.corpus.fingerprint

    def has_fingerprint(self, text: str) -> bool:
        return self.corpus.has_fingerprint(text)


def check_vocabulary(corpus: data.Corpus, vocab: int) -> None:
    """Raises ConfigError where a model has fewer token ids than its data."""
    if corpus.highest_id >= vocab:
        raise ConfigError(
            f"model.vocab={vocab}, but the data holds token id {corpus.highest_id}; "
            "use model.vocab=0 to take the vocabulary of the data"
        )
