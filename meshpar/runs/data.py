"""Data of a run: batches in one global order, from any position on (grain).

Each process reads the rows of a batch that the layout gives it. Where the samples can
be indexed, sample i of a run is a pure function of (data, seed, i): the position of the
data is one number that does not depend on the number of processes.
"""

import abc
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from meshpar.errors import DataError, shown
from meshpar.multihost import agree

_MOST = 2**40
"""Samples of a data set that repeats without end, when they are counted."""


class Place(NamedTuple):
    """The part of a run's batches that a process reads.

    Attributes:
      batch_size: rows of a batch, over all processes.
      rows: rows of the batch that this process holds, ascending.
      seed: of the shuffle.
      position: number of samples that the run has used before.
      state: the state of the iterator that was saved there, if it has one.
    """

    batch_size: int
    rows: Sequence[int]
    seed: int = 0
    position: int = 0
    state: Any = None


class Batches(Iterator):
    """This process's rows of one batch after another."""

    def __init__(self, batches: Iterator[Any]):
        self._batches = batches

    def __next__(self) -> Any:
        return next(self._batches)

    @property
    def state(self) -> Any:
        """The state to go on from, as JSON; None where the position alone is enough.

        It is the same in all processes.
        """
        return None


class Data(abc.ABC):
    """Samples for training or for evaluation.

    Attributes:
      name: a description for people.
    """

    name: str

    @abc.abstractmethod
    def abstract_batch(self, batch_size: int) -> Any:
        """Shapes and dtypes of a batch over all processes: [batch, ...] leaves.

        Raises:
          DataError: data that cannot be read.
        """

    @abc.abstractmethod
    def training_batches(self, place: Place) -> Batches:
        """This process's rows of the training batches; all processes call it.

        Raises:
          DataError: data that cannot be read, or fewer than one batch.
        """

    @abc.abstractmethod
    def evaluation_batches(self, place: Place, limit: int) -> list[Any]:
        """This process's rows of at most `limit` batches; all processes call it.

        Raises:
          DataError: data that cannot be read, or fewer than one batch.
        """

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """A text that changes with the data, as far as is known without reading all."""

    def has_fingerprint(self, text: str) -> bool:
        """Whether a fingerprint, possibly of an earlier version, is of this data."""
        return text == self.fingerprint

    @property
    def num_samples(self) -> float:
        """Samples that training can take; infinite where they repeat or are unknown."""
        return float("inf")

    @property
    def num_different(self) -> float:
        """Samples before any repeats; infinite where the number is unknown."""
        return float("inf")


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


def spread_batches(samples: Sequence[Any], place: Place, limit: int) -> list[Any]:
    """At most `limit` batches, spread evenly over the samples.

    Args:
      samples: the samples, at least one batch of them.
      place: what this process reads.
      limit: largest number of batches.
    """
    number = min(len(samples), _MOST)
    num_batches = min(limit, number // place.batch_size)
    size = num_batches * place.batch_size
    last = number - 1 if number < _MOST else size - 1
    indices = np.linspace(0, last, size).astype(int)
    return [
        stacked([_present(samples, int(batch[row])) for row in place.rows])
        for batch in indices.reshape(num_batches, place.batch_size)
    ]


def stacked(samples: Sequence[Any]) -> Any:
    """Samples as one batch.

    Raises:
      DataError: they have different leaves or shapes.
    """
    try:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *samples)
    except ValueError as error:
        raise DataError(
            f"samples of one batch differ: {shown(str(error), 300)}; give samples with "
            "the same leaves and shapes, padded or cut to one length"
        ) from error


def _abstract(sample: Any, batch_size: int) -> Any:
    def leaf(path: Any, x: Any) -> jax.ShapeDtypeStruct:
        x = np.asarray(x)
        if x.dtype.kind in "OSUMm":
            raise DataError(
                f"a sample{jax.tree_util.keystr(path)} is of {x.dtype}; give numbers, "
                "such as token ids of a text"
            )
        return jax.ShapeDtypeStruct((batch_size, *x.shape), x.dtype)

    return jax.tree_util.tree_map_with_path(leaf, sample)


def _digest(samples: Sequence[Any], *facts: Any) -> str:
    """Hash of facts and of some samples."""
    digest = hashlib.sha256(repr(facts).encode())
    for leaf in jax.tree.leaves(list(samples)):
        leaf = np.asarray(leaf)
        digest.update(f"{leaf.shape} {leaf.dtype}".encode())
        digest.update(leaf.tobytes() if leaf.dtype != object else repr(leaf).encode())
    return digest.hexdigest()[:32]


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
        """As `Data.abstract_batch`."""
        return _abstract(_present(self.samples, 0), batch_size)

    def _check(self, batch_size: int) -> None:
        if len(self.samples) < batch_size:
            raise DataError(
                f"the data hold {len(self.samples)} samples, fewer than one batch of "
                f"{batch_size}; give more, or a smaller batch_size"
            )

    def training_batches(self, place: Place) -> Batches:
        """As `Data.training_batches`."""
        self._check(place.batch_size)
        samples = self.samples if self.in_order else shuffled(self.samples, place.seed)
        return batches_of(samples, place)

    def evaluation_batches(self, place: Place, limit: int) -> list[Any]:
        """As `Data.evaluation_batches`, spread evenly over the samples."""
        self._check(place.batch_size)
        return spread_batches(self.samples, place, limit)

    @property
    def fingerprint(self) -> str:
        """As `Data.fingerprint`: of the number and of 16 samples."""
        number = min(len(self.samples), _MOST)
        some = np.unique(np.linspace(0, min(number, 2**20) - 1, 16).astype(int))
        return _digest([_present(self.samples, int(i)) for i in some], number)

    @property
    def num_different(self) -> float:
        """As `Data.num_different`."""
        return len(self.samples)

    @property
    def num_samples(self) -> float:
        """As `Data.num_samples`."""
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
        """As `Data.abstract_batch`."""
        return _abstract(self._first(), batch_size)

    def training_batches(self, place: Place) -> Batches:
        """As `Data.training_batches`."""
        iterator = iter(self.dataset)
        if place.state is not None:
            iterator.set_state(place.state)
        elif place.position:
            raise DataError(
                f"the checkpoint holds no state of the stream at sample "
                f"{place.position}: it was written with other data; use a new workdir"
            )
        return _StreamBatches(iterator, place)

    def evaluation_batches(self, place: Place, limit: int) -> list[Any]:
        """As `Data.evaluation_batches`: the first batches."""
        batches = _StreamBatches(iter(self.dataset), place)
        return _some(itertools.islice(batches, limit), place.batch_size)

    @property
    def fingerprint(self) -> str:
        """As `Data.fingerprint`: of the first sample."""
        return _digest([self._first()])


def _some(batches: Iterator[Any], batch_size: int) -> list[Any]:
    found = list(batches)
    if not found:
        raise DataError(
            f"the evaluation data hold less than one batch of {batch_size}; give more, "
            "or a smaller batch_size"
        )
    return found


ReadPart = Callable[[int, int, int], Iterator[Any]]
"""(part, number of parts, position) -> batches of that part of every batch."""


class PartData(Data):
    """Batches of a function of yours, which reads one part of every batch.

    Attributes:
      read: (part, number of parts, position) -> iterator of that part's rows of the
        batches after `position` samples, from all parts together. Processes that hold
        the same rows read the same part.
    """

    name = "batches of a function"

    def __init__(self, read: ReadPart):
        self.read = read

    def _whole(self) -> Any:
        batches = self.read(0, 1, 0)
        if not isinstance(batches, Iterable):
            raise DataError(
                f"data(0, 1, 0) gives {shown(repr(batches))}; give an iterator of "
                "batches"
            )
        for batch in batches:
            return jax.tree.map(np.asarray, batch)
        raise DataError("data(0, 1, 0) gives no batch; give at least one")

    def abstract_batch(self, batch_size: int) -> Any:
        """As `Data.abstract_batch`: of the first batch of data(0, 1, 0)."""
        batch = self._whole()
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            if leaf.shape[:1] != (batch_size,):
                raise DataError(
                    f"data(0, 1, 0) gives {jax.tree_util.keystr(path)} of shape "
                    f"{leaf.shape}, and batch_size={batch_size}; give that many rows, "
                    "or set batch_size to them"
                )
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)

    def training_batches(self, place: Place) -> Batches:
        """As `Data.training_batches`."""
        part, number = _part_of(place)
        return Batches(self._rows(part, number, place))

    def _rows(self, part: int, number: int, place: Place) -> Iterator[Any]:
        for batch in self.read(part, number, place.position):
            sizes = {np.shape(x)[:1] for x in jax.tree.leaves(batch)}
            if sizes != {(len(place.rows),)}:
                raise DataError(
                    f"data({part}, {number}, {place.position}) gives leaves of "
                    f"{shown(str(sizes))} rows; give {len(place.rows)} rows, one "
                    f"{number}th of batch_size={place.batch_size}"
                )
            yield batch

    def evaluation_batches(self, place: Place, limit: int) -> list[Any]:
        """As `Data.evaluation_batches`: the first batches."""
        batches = itertools.islice(self.training_batches(place), limit)
        return _some(batches, place.batch_size)

    @property
    def fingerprint(self) -> str:
        """As `Data.fingerprint`: of the first batch of data(0, 1, 0)."""
        return _digest([self._whole()])


def _part_of(place: Place) -> tuple[int, int]:
    """(this process's part, number of parts) of the rows of a batch."""
    own = tuple(map(int, place.rows))
    found = agree.allgather_objects("rows of the data", own)
    parts = sorted(set(map(tuple, found.values())))
    rows = sorted(itertools.chain.from_iterable(parts))
    sizes = {len(part) for part in parts}
    if rows != list(range(place.batch_size)) or len(sizes) > 1:
        raise DataError(
            "the layout gives processes parts of a batch that overlap, which a "
            "function of parts cannot read; use data with single samples, such as a "
            "grain.MapDataset"
        )
    return parts.index(own), len(parts)
