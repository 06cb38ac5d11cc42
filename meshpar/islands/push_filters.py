"""Filters of pushes: numbers that islands leave out, and numbers that are packed.

Every range's part of a push is a pair (sorted keys or None, values). It passes the
filters of the mode in order, and the store undoes them in reverse order. The worker
undoes them as well: what the store does not get is added to the worker's next push, as
the error of a wire format is, or is dropped without `error_feedback`.

    name              what is sent
    significant:T     numbers above T, with what waited from earlier pushes
    relative:T        numbers above T times the weight that they change
    skip:P            a random share 1 - P of the numbers, the same for all islands
    zlib              all of them, compressed without loss

Source: Li et al., Parameter Server, OSDI 2014, section 3.7, and NeurIPS 2014, section
  3.3 (filters of a user, significantly modified, random skip, compression); Hsieh et
  al., Gaia, NSDI 2017 (updates relative to their weights).
"""

import abc
import contextlib
import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshpar.errors import MeshparError, shown
from meshpar.islands.messages import Payload
from meshpar.islands.rules import Decoder
from meshpar.settings import Range

FILTERED = "filtered"
"""Encoding of a payload that has passed the filters of a mode."""

Memory = dict[str, np.ndarray]
"""Arrays by name that a worker, or a range of the store, keeps for its filters."""


class Turn(NamedTuple):
    """The circumstances of one push to one range.

    Attributes:
      range: name of the range.
      worker: who pushes.
      clock: pushes that it has made to the range before.
      weights: the newest values of the range that the worker has read.
      memory: the worker's own for this range; it is saved with checkpoints.
    """

    range: str
    worker: str
    clock: int
    weights: np.ndarray
    memory: Memory


class PushFilter(abc.ABC):
    """A filter of pushes, to subclass.

    All islands and servers share the object, or have copies of it, so it holds settings
    alone and changes nothing of itself. `repr` of it belongs to the identity of
    checkpoints.

    Attributes:
      packs: whether it makes something else of the pair (keys, values); the filters
        behind it have to take that.
      remembers: vectors as long as the weights for which checkpoints leave room, in
        every worker's `memory` and in the store for each worker.
    """

    packs = False
    remembers = 0

    @abc.abstractmethod
    def encode(self, data: Any, turn: Turn) -> Any:
        """Leaves out or packs data.

        Args:
          data: (sorted keys or None, values), or what the filter before made of it.
          turn: the circumstances.

        Returns:
          What is sent; arrays and bytes in it, also in tuples and dicts, are counted.
        """

    def decode(self, data: Any, size: int, memory: Memory) -> Any:
        """Undoes `encode` as far as a store needs it; by default it takes what it gets.

        Args:
          data: what `encode` returned.
          size: keys of the range.
          memory: the range's for all workers; it is replicated and saved.

        Raises:
          RefusedError: data that it cannot take.
        """
        del size, memory
        return data

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({vars(self)})"


def _chosen(data: Any, keep: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Any:
    """The entries of a pair for which a function (keys, values) is true."""
    keys, values = data
    if keys is None:
        keys = np.arange(len(values), dtype=np.int32)
    kept = keep(keys, values)
    return keys[kept], values[kept]


@dataclasses.dataclass(frozen=True)
class Significant(PushFilter):
    """Sends numbers above a threshold.

    Attributes:
      threshold: numbers at or below it are left out.
      relative: whether the threshold is multiplied with the weight that changes.
    """

    threshold: float
    relative: bool = False

    def __post_init__(self):
        if not 0 <= self.threshold < math.inf:
            raise MeshparError(
                f"threshold={self.threshold} of a filter: use a number, at least 0"
            )

    def encode(self, data: Any, turn: Turn) -> Any:
        def keep(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
            least = np.float32(self.threshold)
            if self.relative:
                least = least * np.abs(turn.weights[keys])
            return ~(np.abs(values) <= least)  # NaN is sent.

        return _chosen(data, keep)


@dataclasses.dataclass(frozen=True)
class RandomSkip(PushFilter):
    """Leaves out numbers at random, the same ones in all pushes of a clock.

    Attributes:
      probability: of a number to be left out.
    """

    probability: float

    def __post_init__(self):
        if not 0 <= self.probability < 1:
            raise MeshparError(
                f"probability={self.probability} of a skip: use a number from 0 to "
                "below 1"
            )

    def encode(self, data: Any, turn: Turn) -> Any:
        draws = np.random.default_rng([zlib.crc32(turn.range.encode()), turn.clock])
        kept = draws.random(len(turn.weights)) >= self.probability
        return _chosen(data, lambda keys, _: kept[keys])


@dataclasses.dataclass(frozen=True)
class Zlib(PushFilter):
    """Compresses keys and values without loss."""

    packs = True

    def encode(self, data: Any, turn: Turn) -> Any:
        keys, values = data
        if keys is not None:  # Distances between keys are small, and so compress.
            keys = np.diff(keys.astype(np.int32), prepend=np.int32(0))
            keys = _packed(keys)
        return keys, _packed(values.astype(np.float32, copy=False))

    def decode(self, data: Any, size: int, memory: Memory) -> Any:
        keys, values = data
        if keys is not None:
            keys = np.cumsum(_unpacked(keys, np.int32), dtype=np.int32)
        return keys, _unpacked(values, np.float32)


def _packed(array: np.ndarray) -> bytes:
    """Equal bytes of neighbours stand together, so exponents compress."""
    return zlib.compress(array.view(np.uint8).reshape(-1, 4).T.tobytes(), 1)


def _unpacked(data: bytes, dtype: type) -> np.ndarray:
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(4, -1)
    return np.ascontiguousarray(rows.T).view(dtype).reshape(-1)


# Filters as settings.

_NUMBERS: Mapping[str, Callable[[float], PushFilter]] = {
    "significant": Significant,
    "relative": functools.partial(Significant, relative=True),
    "skip": RandomSkip,
}
"""{name: (number -> filter)}."""

_TEXTS = (
    "significant:T, relative:T, skip:P or zlib, several with + between them and zlib "
    "last (as in significant:0.001+zlib)"
)


def parse_filters(text: str) -> tuple[PushFilter, ...]:
    """The filters that a setting names; none for "".

    Raises:
      MeshparError: another text.
    """
    found = tuple(_parse(word, text) for word in text.split("+")) if text else ()
    check_order(found)
    return found


def _parse(word: str, text: str) -> PushFilter:
    name, _, number = word.partition(":")
    if word == "zlib":
        return Zlib()
    if name in _NUMBERS:
        with contextlib.suppress(ValueError):  # No number, or one out of range.
            return _NUMBERS[name](float(number))
    raise MeshparError(f"filters={shown(text)}: use {_TEXTS}")


def check_order(filters: Sequence[PushFilter]) -> None:
    """Raises MeshparError if a filter would get what another one has packed."""
    for first, second in itertools.pairwise(filters):
        if first.packs and not second.packs:
            raise MeshparError(
                f"filters: {second} comes behind {first}, which packs keys and "
                "numbers; put filters that pack last"
            )


@dataclasses.dataclass(frozen=True)
class FilterTexts(Range):
    """The texts that `parse_filters` takes, up to a number of characters."""

    longest: int = 200
    in_words = _TEXTS

    def allows(self, value: Any) -> bool:
        if not isinstance(value, str) or len(value) > self.longest:
            return False
        try:
            parse_filters(value)
        except MeshparError:
            return False
        return True


@dataclasses.dataclass(frozen=True)
class Filters(Range):
    """Tuples of filters."""

    in_words = "a tuple of meshpar.islands.PushFilter objects"

    def allows(self, value: Any) -> bool:
        return isinstance(value, tuple) and all(
            isinstance(part, PushFilter) for part in value
        )


# The two ends.


def _decode(
    filters: tuple[PushFilter, ...], data: Any, size: int, memory: Memory
) -> tuple[np.ndarray | None, np.ndarray]:
    """(sorted keys or None, values) of a payload, if the filters are right."""
    for part in reversed(filters):
        data = part.decode(data, size, memory)
    return data


def filter_decoders(filters: tuple[PushFilter, ...]) -> Mapping[str, Decoder]:
    """{encoding: decoder} of a mode's filters, for the store."""
    return {FILTERED: functools.partial(_decode, filters)} if filters else {}


class FilteredPushes:
    """Pushes of a worker through filters, and the numbers that were not sent.

    Args:
      filters: of the mode, at least one.
      worker: its name.
      keeps: whether numbers that were left out are added to the next push.

    Attributes:
      unsent: {range: numbers that were not sent so far}.
    """

    def __init__(self, filters: tuple[PushFilter, ...], worker: str, keeps: bool):
        self._filters, self._worker, self._keeps = filters, worker, keeps
        self.unsent: dict[str, np.ndarray] = {}
        # The worker's memory for `encode`, and its copy of the store's for `decode`.
        self._memories: dict[str, tuple[Memory, Memory]] = {}

    def encode(
        self,
        name: str,
        values: np.ndarray,
        clock: int,
        weights: np.ndarray,
        **payload: object,
    ) -> Payload:
        """The payload of a range's part [n] of a push.

        Args:
          name: the range.
          values: numbers of the push.
          clock: pushes that were made before.
          weights: the newest values [n] of the range that the worker has read.
          payload: further fields of `Payload`.

        Raises:
          MeshparError: filters that give no keys and values.
        """
        if self._keeps:
            values = values + self.unsent.get(name, np.float32(0))
        own, copy = self._memories.setdefault(name, ({}, {}))
        data: Any = (None, values)
        for part in self._filters:
            data = part.encode(data, Turn(name, self._worker, clock, weights, own))
        if self._keeps:
            self.unsent[name] = self._unsent(name, values, data, copy)
        return Payload(data, FILTERED, **payload)

    def _unsent(
        self, name: str, values: np.ndarray, data: Any, memory: Memory
    ) -> np.ndarray:
        unsent = values.copy()
        try:
            keys, sent = _decode(self._filters, data, len(values), memory)
            at = slice(None) if keys is None else keys
            mine = values[at]
            left = np.zeros_like(mine)  # Also where both are infinite.
            unsent[at] = np.subtract(mine, sent, out=left, where=mine != sent)
        except Exception as error:
            raise MeshparError(
                f"push to {name}: filters={self._filters} made no pair (sorted keys or "
                f"None, values) of {len(values)} numbers: {type(error).__name__}: "
                f"{error}"
            ) from error
        return unsent

    def snapshot(self) -> dict[str, np.ndarray]:
        """Numbers that wait and memories, as a flat dict."""
        arrays = {f"unsent|{name}": array for name, array in self.unsent.items()}
        for name, both in self._memories.items():
            for kind, memory in zip(("memory", "copy"), both, strict=True):
                arrays |= {f"{kind}|{name}|{k}": np.array(v) for k, v in memory.items()}
        return arrays

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        """Takes what it finds of a snapshot."""
        self.unsent, self._memories = {}, {}
        for path, array in snapshot.items():
            kind, _, name = path.partition("|")
            if kind == "unsent":
                self.unsent[name] = np.array(array)
            elif kind in ("memory", "copy"):
                name, _, key = name.partition("|")
                both = self._memories.setdefault(name, ({}, {}))
                both[kind == "copy"][key] = np.array(array)
