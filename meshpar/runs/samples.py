"""Samples of a run, by index or as a stream, and batches of them (grain)."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from meshpar.errors import DataError, shown
from meshpar.replicated import is_replicated
from meshpar.runs.data import Batches, Data, HeldOut, Place, digest

_MOST = 2**40
"""Samples of a data set that repeats without end, when they are counted."""


class _BatchRows:
    """The samples of some rows of every batch, from a global position on."""

    def __init__(self, samples: Sequence[Any], place: Place):
        self._samples, self._place = samples, place

    def __len__(self) -> int:
        left = len(self._samples) - self._place.position
        return left // self._place.batch_size * len(self._place.rows)

    def __getitem__(self, i: int) -> Any:
        batch_size, rows, _, position, _ = self._place
        step, row = divmod(i, len(rows))
        return _present(self._samples, position + step * batch_size + int(rows[row]))


def _present(samples: Sequence[Any], i: int) -> Any:
    """A sample.

    Raises:
      DataError: there is none, as where a filter of a grain.MapDataset has left it out.
    """
    sample = samples[i]
    if sample is None:
        raise DataError(
            f"sample {i} of the data is None: a filtered grain.MapDataset has holes; "
            "give dataset.to_iter_dataset(), or filter before the dataset is made"
        )
    return sample


def batches_of(samples: Sequence[Any], place: Place) -> Batches:
    """Batches of samples in their order, read ahead by two threads.

    Args:
      samples: the samples in the order of training.
      place: what this process reads.
    """
    import grain

    own = grain.MapDataset.source(_BatchRows(samples, place))
    own = own.batch(len(place.rows), batch_fn=stacked)
    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return Batches(iter(own.to_iter_dataset(options)))


def shuffled(samples: Sequence[Any], seed: int) -> Sequence[Any]:
    """Samples without end, shuffled anew in every epoch."""
    import grain

    return grain.MapDataset.source(samples).seed(seed).shuffle().repeat()


def spread_batches(samples: Sequence[Any], place: Place, limit: int) -> HeldOut:
    """All samples, each once; or `limit` batches, spread evenly over more samples.

    Args:
      samples: the samples.
      place: what this process reads.
      limit: largest number of batches.
    """
    number, size = min(len(samples), _MOST), limit * place.batch_size
    last = number - 1 if number < _MOST else size - 1
    indices = np.linspace(0, last, min(size, number)).astype(int)
    whole, rest = _cut(indices, place.batch_size)

    def batch(indices: Iterable[int]) -> Any:
        return stacked([_present(samples, int(i)) for i in indices])

    batches = [batch(rows[place.rows]) for rows in whole]
    return HeldOut(batches, batch(rest) if len(rest) else None)


def _cut(rows: Sequence[Any], size: int) -> tuple[list[Any], Any]:
    """(groups of `size` rows, the rows that are left)."""
    ends = range(size, len(rows) + 1, size)
    return [rows[end - size : end] for end in ends], rows[len(ends) * size :]


def stacked(samples: Sequence[Any]) -> Any:
    """Samples as one batch.

    Raises:
      DataError: they have different leaves or shapes, or values without rows.
    """

    def leaf(first: Any, *others: Any) -> Any:
        if not is_replicated(first):
            return np.stack((first, *others))
        if not all(x is first or _equal(x, first) for x in others):
            raise DataError(
                "samples of one batch have different values in a meshpar.Replicated; "
                "give them as rows"
            )
        return first

    try:
        return jax.tree.map(leaf, *samples, is_leaf=is_replicated)
    except ValueError as error:
        raise DataError(
            f"samples of one batch differ: {shown(str(error), 300)}; give samples with "
            "the same leaves and shapes, padded or cut to one length"
        ) from error


def _equal(one: Any, other: Any) -> bool:
    """Whether two trees of arrays hold the same."""
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))


def _abstract(sample: Any, batch_size: int) -> Any:
    def leaf(path: Any, x: Any, rows: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        x = np.asarray(x)
        if x.dtype.kind in "OSUMm":
            raise DataError(
                f"a sample{jax.tree_util.keystr(path)} is of {x.dtype}; give numbers, "
                "such as token ids of a text"
            )
        return jax.ShapeDtypeStruct((*rows, *x.shape), x.dtype)

    def node(path: Any, x: Any) -> Any:
        if is_replicated(x):
            return jax.tree.map(lambda x: leaf(path, x, ()), x)
        return leaf(path, x, (batch_size,))

    return jax.tree_util.tree_map_with_path(node, sample, is_leaf=is_replicated)


class IndexedData(Data):
    """Samples that can be indexed.

    Attributes:
      samples: the samples: a grain.MapDataset, or a sequence.
      in_order: whether training takes them in their order, once; else they are shuffled
        anew in every epoch, without end.
    """

    def __init__(self, samples: Sequence[Any], in_order: bool):
        self.samples, self.in_order = samples, in_order
        number = len(samples)
        self.name = f"{number:,} samples" if number < _MOST else "samples without end"
        if not number:
            raise DataError("the data hold no sample; give at least one batch of them")

    def abstract_batch(self, batch_size: int) -> Any:
        return _abstract(_present(self.samples, 0), batch_size)

    def check_batch_size(self, batch_size: int) -> None:
        if len(self.samples) < batch_size:
            raise DataError(
                f"the data hold {len(self.samples)} samples, fewer than one batch of "
                f"{batch_size}; give more, or a smaller batch_size"
            )

    def training_batches(self, place: Place) -> Batches:
        self.check_batch_size(place.batch_size)
        samples = self.samples if self.in_order else shuffled(self.samples, place.seed)
        return batches_of(samples, place)

    def evaluation_batches(self, place: Place, limit: int) -> HeldOut:
        """Batches of all samples, or of some spread evenly."""
        return spread_batches(self.samples, place, limit)

    @property
    def fingerprint(self) -> str:
        """A fingerprint of the number and of 16 samples."""
        number = min(len(self.samples), _MOST)
        some = np.unique(np.linspace(0, min(number, 2**20) - 1, 16).astype(int))
        return digest([_present(self.samples, int(i)) for i in some], number)

    @property
    def num_samples(self) -> float:
        ends = self.in_order and len(self.samples) < _MOST
        return len(self.samples) if ends else float("inf")


class _StreamBatches(Batches):
    """Batches of an iterator that all processes read, each keeping its own rows."""

    def __init__(self, iterator: Any, place: Place):
        self._iterator, self._place = iterator, place

    def __next__(self) -> Any:
        samples = list(itertools.islice(self._iterator, self._place.batch_size))
        if len(samples) < self._place.batch_size:
            raise StopIteration
        return stacked([samples[int(row)] for row in self._place.rows])

    @property
    def state(self) -> Any:
        return self._iterator.get_state()


class StreamData(Data):
    """Samples of a grain.IterDataset, which all processes read in the same order.

    The state of its iterator is saved with the checkpoint: a run goes on with the next
    sample in any number of processes.

    Attributes:
      dataset: the dataset; its elements are samples.
    """

    name = "a stream of samples"

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def _first(self) -> Any:
        for sample in self.dataset:
            return sample
        raise DataError("the stream of data is empty; give at least one batch")

    def abstract_batch(self, batch_size: int) -> Any:
        return _abstract(self._first(), batch_size)

    def training_batches(self, place: Place) -> Batches:
        iterator = iter(self.dataset)
        if place.state is not None:
            iterator.set_state(place.state)
        elif place.position:
            raise DataError(
                f"the checkpoint holds no state of the stream at sample "
                f"{place.position}: it was written with other data; use a new workdir"
            )
        return _StreamBatches(iterator, place)

    def evaluation_batches(self, place: Place, limit: int) -> HeldOut:
        """Batches of the first samples."""
        samples = itertools.islice(self.dataset, limit * place.batch_size)
        whole, rest = _cut(list(samples), place.batch_size)
        batches = [stacked([rows[int(i)] for i in place.rows]) for rows in whole]
        return HeldOut(batches, stacked(rest) if rest else None).checked()

    @property
    def fingerprint(self) -> str:
        """A fingerprint of the first sample."""
        return digest([self._first()])
