"""DBPG: delayed block proximal gradient for L1 logistic regression with sparse keys.

The features are cut into blocks, and a task updates one block: every worker pushes
gradient and curvature of its rows, the server that holds the block waits for all of
them and takes a proximal step, and the workers pull its new weights. A worker begins
task t once it has pulled the result of task t - delay - 1, so that up to `delay` tasks
are under way while it computes. A worker sends and asks only for keys in its rows.

Source: Li et al., Communication Efficient Distributed Machine Learning with the
  Parameter Server, NeurIPS 2014, algorithm 3.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp

from meshpar.errors import MeshparError
from meshpar.islands.key_range import Slice
from meshpar.methods.dbpg.filters import (
    COMPRESSIONS,
    KeyCaching,
    RandomSkip,
    SignificantlyModified,
    ValueCompression,
)
from meshpar.methods.dbpg.kkt import KKTFilter
from meshpar.methods.dbpg.packet import Filter, Link, Memory, Packet
from meshpar.methods.dbpg.proximal import gradient_and_curvature


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of DBPG.

    Attributes:
      l1: weight of the sum of absolute weights beside the sum of the losses.
      passes: over all blocks; each pass has another order.
      blocks: of features.
      delay: tasks that may be under way while a worker computes another one.
      damping: factor of the curvature; a larger one takes smaller steps.
      kkt_filter: whether keys that are far from the KKT bounds are left out.
      kkt_ratio: threshold of that filter over the largest violation in the block.
      full_every: passes from one that leaves out no key to the next.
      skip: probability that a key is skipped in a task.
      significant: changes up to this are not sent back; None sends all weights back.
      key_caching: whether known lists of keys are sent as a hash.
      compression: of the numbers, "zlib" or "bf16"; "" for none.
      seed: of the order of the blocks and of what is skipped.
    """

    l1: float = 1.0
    passes: int = 20
    blocks: int = 64
    delay: int = 2
    damping: float = 0.5
    kkt_filter: bool = False
    kkt_ratio: float = 0.05
    full_every: int = 10
    skip: float = 0.0
    significant: float | None = None
    key_caching: bool = False
    compression: str = ""
    seed: int = 0

    def __post_init__(self):
        for name in ("passes", "blocks", "full_every"):
            count = getattr(self, name)
            if not isinstance(count, int) or count < 1:
                raise MeshparError(f"{name}={count}: use a whole number, at least 1")
        if not isinstance(self.delay, int) or not 0 <= self.delay < self.blocks:
            raise MeshparError(
                f"delay={self.delay} with blocks={self.blocks}: use a whole number "
                "from 0 to below the number of blocks"
            )
        for name in ("l1", "damping"):
            if not 0 < getattr(self, name) < float("inf"):
                raise MeshparError(
                    f"{name}={getattr(self, name)}: use a number above 0"
                )
        if not 0 <= self.kkt_ratio < float("inf"):
            raise MeshparError(f"kkt_ratio={self.kkt_ratio}: use a number, at least 0")
        if self.compression and self.compression not in COMPRESSIONS:
            raise MeshparError(
                f"compression={self.compression!r}: use one of {[*COMPRESSIONS]}"
            )

    def order(self, number: int) -> list[int]:
        """The blocks of a pass in order, the same for all workers."""
        rng = np.random.default_rng((self.seed, number))
        return rng.permutation(self.blocks).tolist()


class Filters(NamedTuple):
    """The filters of a training: before the gradient, of pushes and of answers."""

    kkt: KKTFilter | None
    pushes: Link
    answers: Link


def make_filters(settings: Settings, largest_block: int) -> Filters:
    """The filters that the settings ask for, in the order in which they act."""
    pushes: list[Filter] = []
    answers: list[Filter] = []
    for link in (pushes, answers):
        if settings.skip:
            link.append(RandomSkip(settings.skip, settings.seed))
    if settings.significant is not None:
        answers.append(SignificantlyModified(largest_block, settings.significant))
    if settings.key_caching:
        pushes.append(KeyCaching())
    for link in (pushes, answers):
        if settings.compression:
            link.append(ValueCompression(settings.compression))
    kkt = KKTFilter(columns=2) if settings.kkt_filter else None
    return Filters(kkt, Link(pushes), Link(answers))


def _row_sums(matrix: sp.csc_array) -> np.ndarray:
    return np.asarray(matrix.sum(axis=1)).ravel()


class _Block(NamedTuple):
    """A worker's share of a block.

    Attributes:
      keys: those that occur in its rows, int32 [keys], from 0 in each block.
      columns: csc [rows, keys].
      magnitudes: absolute values of `columns`.
      weights: last known, float32 [keys].
    """

    keys: np.ndarray
    columns: sp.csc_array
    magnitudes: sp.csc_array
    weights: np.ndarray


class Worker:
    """One worker: its rows, the margins of its rows, and the weights that it knows.

    Args:
      name: unique among all workers.
      rows: its rows, [rows, features].
      labels: 1 or -1, [rows].
      blocks: parts of the features.
      filters: of the training.
      delay: tasks that may be under way at the same time.
    """

    def __init__(
        self,
        name: str,
        rows: sp.csr_array,
        labels: np.ndarray,
        blocks: Sequence[Slice],
        filters: Filters,
        delay: int,
    ):
        self.name, self._labels, self._filters = name, labels, filters
        self._margins = np.zeros(len(labels))
        self._memory: Memory = {}
        self._blocks = [self._cut(rows, block) for block in blocks]
        # Mass of every row in the keys of each block that still move, and in all.
        self._masses = [_row_sums(part.magnitudes) for part in self._blocks]
        self._mass = np.sum(self._masses, axis=0)
        self._late_share = delay / max(1, len(blocks) - 1)

    @staticmethod
    def _cut(rows: sp.csr_array, block: Slice) -> _Block:
        part = rows[:, block.start : block.stop].tocsc()
        keys = np.flatnonzero(np.diff(part.indptr)).astype(np.int32)
        columns = part[:, keys]
        return _Block(keys, columns, abs(columns), np.zeros(len(keys), np.float32))

    def _channel(self, block: int) -> str:
        return f"{self.name}|{block}"

    def num_keys(self, block: int) -> int:
        """Keys of a block that occur in its rows."""
        return len(self._blocks[block].keys)

    def push(self, task: int, block: int, full: bool) -> Packet:
        """The packet of one task, with the keys that are to be updated.

        Args:
          task: number of the task, the same for all workers.
          block: to update.
          full: whether the KKT filter leaves out no key.
        """
        part, kkt = self._blocks[block], self._filters.kkt
        chosen = np.arange(len(part.keys))
        if kkt:
            chosen = kkt.select(self._channel(block), len(part.keys), full)
        columns, magnitudes = part.columns, part.magnitudes
        if len(chosen) < len(part.keys):
            columns, magnitudes = columns[:, chosen], magnitudes[:, chosen]
        mass = self._moving_mass(block, _row_sums(magnitudes))
        numbers = gradient_and_curvature(
            columns, magnitudes, self._labels, self._margins, mass
        )
        keys, channel = part.keys[chosen], self._channel(block)
        return Packet(channel, task, keys, numbers, columns=2)

    def _moving_mass(self, block: int, own: np.ndarray) -> np.ndarray:
        """Mass of the keys that move at the same time: this block's and late ones.

        Up to `delay` other blocks move before this push is applied; their mass is
        that of the mean block.
        """
        self._mass += own - self._masses[block]
        self._masses[block] = own
        return own + self._late_share * (self._mass - own)

    def receive(self, block: int, packet: Packet) -> None:
        """Takes the new weights of the keys that were pushed; NaN for those far away.

        Args:
          block: that was updated.
          packet: the answer as it was sent, with weights of some or all of those keys.
        """
        part = self._blocks[block]
        packet = self._filters.answers.decode(packet, self._memory)
        answered = np.searchsorted(part.keys, packet.keys)
        weights = packet.values[0]
        if self._filters.kkt:
            self._filters.kkt.learn(self._channel(block), answered, weights)
        weights = np.nan_to_num(weights)
        change = weights - part.weights[answered]
        part.weights[answered] = weights
        moved = np.flatnonzero(change)
        columns = part.columns[:, answered[moved]]
        self._margins += self._labels * (columns @ change[moved])
