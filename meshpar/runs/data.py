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
from meshpar.lowering.state import Metrics
from meshpar.lowering.train_program import TrainProgram
from meshpar.metrics import MetricSums
from meshpar.multihost import agree
from meshpar.replicated import map_rows, num_rows, row_leaves


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


class HeldOut(NamedTuple):
    """Batches to evaluate on.

    Attributes:
      batches: this process's rows of whole batches.
      rest: all rows of one more batch that has fewer, in every process; None without.
    """

    batches: list[Any]
    rest: Any = None

    def metric_sums(
        self, program: TrainProgram, evaluate: Callable[[Any, int | None], Metrics]
    ) -> MetricSums:
        """Sums of the metrics of all batches.

        Args:
          program: the program that evaluates.
          evaluate: (this process's rows, number of all rows if the batch has fewer) ->
            metrics.
        """
        sums = program.metric_sums()
        for batch in self.batches:
            sums.add(evaluate(batch, None))
        if self.rest is not None:
            rows = num_rows(self.rest)
            own = map_rows(lambda x: x[program.rows_of(rows)], self.rest)
            sums.add(evaluate(own, rows))
        return sums

    def checked(self) -> "HeldOut":
        """Itself.

        Raises:
          DataError: it holds no row.
        """
        if not self.batches and self.rest is None:
            raise DataError("the evaluation data hold no sample; give at least one")
        return self


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

    def check_batch_size(self, batch_size: int) -> None:
        """Raises DataError if the data are known to hold less than one batch."""
        del batch_size

    @abc.abstractmethod
    def training_batches(self, place: Place) -> Batches:
        """This process's rows of the training batches; all processes call it.

        Raises:
          DataError: data that cannot be read, or fewer than one batch.
        """

    @abc.abstractmethod
    def evaluation_batches(self, place: Place, limit: int) -> HeldOut:
        """At most `limit` batches to evaluate on; all processes call it.

        Raises:
          DataError: data that cannot be read, or no sample.
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


def digest(samples: Sequence[Any], *facts: Any) -> str:
    """Hash of facts and of some samples."""
    found = hashlib.sha256(repr(facts).encode())
    for leaf in jax.tree.leaves(list(samples)):
        leaf = np.asarray(leaf)
        found.update(f"{leaf.shape} {leaf.dtype}".encode())
        found.update(leaf.tobytes() if leaf.dtype != object else repr(leaf).encode())
    return found.hexdigest()[:32]


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
        """The shapes of the first batch of data(0, 1, 0)."""
        batch = self._whole()
        rows = map_rows(lambda x: x, batch, others=lambda _: None)
        if not row_leaves(batch):
            raise DataError(
                "data(0, 1, 0) gives no array with rows; give arrays "
                f"[{batch_size}, ...]"
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(rows):
            if leaf.shape[:1] != (batch_size,):
                raise DataError(
                    f"data(0, 1, 0) gives {jax.tree_util.keystr(path)} of shape "
                    f"{leaf.shape}, and batch_size={batch_size}; give that many rows, "
                    "or set batch_size to them"
                )
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)

    def training_batches(self, place: Place) -> Batches:
        part, number = _part_of(place)
        return Batches(self._rows(part, number, place))

    def _rows(self, part: int, number: int, place: Place) -> Iterator[Any]:
        for batch in self.read(part, number, place.position):
            sizes = {x.shape[:1] for x in row_leaves(batch)}
            if sizes != {(len(place.rows),)}:
                raise DataError(
                    f"data({part}, {number}, {place.position}) gives leaves of "
                    f"{shown(str(sizes))} rows; give {len(place.rows)} rows, one "
                    f"{number}th of batch_size={place.batch_size}"
                )
            yield batch

    def evaluation_batches(self, place: Place, limit: int) -> HeldOut:
        """The first batches.

        A part that has fewer rows of a batch ends the whole ones; data(0, 1, position)
        then gives all that are left.
        """
        part, number = _part_of(place)
        rows = (len(place.rows),)

        def is_whole(batch: Any) -> bool:
            return all(x.shape[:1] == rows for x in row_leaves(batch))

        own = itertools.takewhile(is_whole, self.read(part, number, place.position))
        batches = list(itertools.islice(own, limit))
        found = agree.allgather_objects("batches to evaluate on", len(batches))
        if (num := min(found.values())) == limit:
            return HeldOut(batches)
        position = place.position + num * place.batch_size
        rest = next(iter(self.read(0, 1, position)), None)
        if rest is not None and num_rows(rest) >= place.batch_size:
            raise DataError(
                f"data(0, 1, {position}) gives {num_rows(rest)} rows, and the parts "
                f"give less than a batch of {place.batch_size} there; give the same "
                "rows in parts and whole"
            )
        return HeldOut(batches[:num], rest).checked()

    @property
    def fingerprint(self) -> str:
        """A fingerprint of the first batch of data(0, 1, 0)."""
        return digest([self._whole()])


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
