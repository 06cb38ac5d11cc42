"""A worker of any host: pulls, trains on batches and pushes, one phase at a time.

The phases are data, so that a worker can be saved between any two of them.
"""

import collections
import dataclasses
import time
import zlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from meshpar.islands.algorithms import Island
from meshpar.islands.key_range import Slice
from meshpar.islands.managed import ManagedPushes
from meshpar.islands.message_bytes import payload_bytes
from meshpar.islands.messages import Payload, Values
from meshpar.islands.mode import Islands
from meshpar.islands.push_filters import FilteredPushes
from meshpar.islands.wire import PushEncoder

FETCH, TRAIN, PUSH = "fetch", "train", "push"
"""The phases of a worker."""


class Endpoint(Protocol):
    """A worker's way to the store; both methods wait."""

    def pull(
        self, names: list[str], clock: int, known: Mapping[str, int]
    ) -> list[Values]:
        """Reads ranges; waits as the consistency model wants it."""

    def push(self, clock: int, payloads: Mapping[str, Payload]) -> None:
        """Pushes to ranges; returns when all replicas have it."""


@dataclasses.dataclass(frozen=True)
class Span:
    """An activity of a worker, from `start` to `stop` in seconds of its clock."""

    kind: str
    start: float
    stop: float


class Worker:
    """Trains one island against a store.

    Args:
      name: its name in the store.
      island: what trains.
      mode: the mode.
      slices: the ranges, and the parts of the vector that they hold.
      endpoint: its way to the store.
      clock: at which it joined.

    Attributes:
      phase: what comes next.
      clock: pushes made.
      pulling: whether it reads from the store, or waits until it may.
    """

    def __init__(
        self,
        name: str,
        island: Island,
        mode: Islands,
        slices: list[Slice],
        endpoint: Endpoint,
        clock: int = 0,
    ):
        self.name, self.clock, self.phase = name, clock, FETCH
        self.pulling = False
        self.island = island
        self._spans = collections.deque[Span](maxlen=10_000)
        self._mode, self._slices, self._endpoint = mode, slices, endpoint
        self._encoder: PushEncoder | FilteredPushes
        self._encoder = PushEncoder(mode.wire, mode.error_feedback)
        if mode.filters:
            self._encoder = FilteredPushes(mode.filters, name, mode.error_feedback)
        self._managed: ManagedPushes | None = None
        if mode.budget:
            seed = zlib.crc32(name.encode())
            self._managed = ManagedPushes(
                island.vector.size, mode.budget, mode.order, seed
            )
        self._center_N = np.zeros(island.vector.size, np.float32)
        self._versions: dict[str, int] = {}
        self._steps, self._age = 0, 0
        self._bytes = {"pushed": 0, "pulled": 0}
        self._seconds = {"wait": 0.0, "compute": 0.0}

    def prepare(self) -> None:
        """Runs the phases until the worker needs a batch."""
        while self.phase != TRAIN:
            if self.phase == PUSH:
                self.push()
            else:
                self._fetch()

    def train(self, batch: Any) -> dict[str, float]:
        """Trains on one batch; returns metrics of the batch and of this worker."""
        start = time.monotonic()
        metrics = dict(self.island.train(batch))
        self._spent("compute", start)
        self._steps += 1
        mode, self.phase = self._mode, TRAIN
        if self._steps % mode.push == 0:
            self.phase = PUSH
        elif self._fetches():
            self.phase = FETCH
        metrics |= {f"{kind}_seconds": s for kind, s in self._seconds.items()}
        metrics |= {f"{kind}_bytes": n for kind, n in self._bytes.items()}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._bytes = dict.fromkeys(self._bytes, 0)
        return metrics | {"age": float(self._age), "clock": float(self.clock)}

    def _fetches(self) -> bool:
        if self.island.pulls_before_push:
            return False
        every = (
            self._mode.push if self._mode.algorithm == "diloco" else self._mode.fetch
        )
        return self._steps % every == 0

    def _fetch(self) -> None:
        self._pull()
        self.island.fetched(self._center_N)
        self.phase = TRAIN

    def _pull(self) -> None:
        start = time.monotonic()
        names = [part.range.name for part in self._slices]
        self.pulling = True
        found = self._endpoint.pull(names, self.clock, self._versions)
        self.pulling = False
        for part, values in zip(self._slices, found, strict=True):
            if values.values is not None:
                self._center_N[part.start : part.stop] = values.values
                self._bytes["pulled"] += values.values.nbytes
            self._versions[values.range] = values.version
        self._age = max(0, self.clock - min(values.slowest for values in found))
        self._spent("wait", start)

    def push(self) -> None:
        """Runs the phase of a push."""
        if self.island.pulls_before_push:
            self._pull()
        start, weight = time.monotonic(), max(self.island.weight, 1e-9)
        vector_N = self.island.contribution(self._center_N)
        payloads = self._payloads(vector_N, weight)
        self._endpoint.push(self.clock, payloads)
        self._bytes["pushed"] += sum(map(payload_bytes, payloads.values()))
        self.clock += 1
        self.phase = FETCH if self._fetches() else TRAIN
        self._spent("push", start)

    def _payloads(self, vector_N: np.ndarray, weight: float) -> dict[str, Payload]:
        """{range: its part of a push [N]}, or of what the budget sends of it."""
        keys, payloads = None, {}
        if self._managed is not None:
            keys, vector_N = self._managed.take(vector_N, self._center_N)
        for part in self._slices:
            name, at = part.range.name, slice(part.start, part.stop)
            facts = dict(weight=weight, version=self._versions.get(name, -1))
            if keys is not None:
                at = slice(*np.searchsorted(keys, [part.start, part.stop]))
                data = keys[at] - np.int32(part.start), vector_N[at].copy()
                payloads[name] = Payload(data, **facts)
                continue
            if self.island.read_N is not None:
                facts["read"] = self.island.read_N[at].copy()
            push = vector_N[at].copy(), self.clock, self._center_N[at]
            payloads[name] = self._encoder.encode(name, *push, **facts)
        return payloads

    def _spent(self, kind: str, start: float) -> None:
        stop = time.monotonic()
        self._spans.append(Span(kind, start, stop))
        kind = "compute" if kind == "compute" else "wait"
        self._seconds[kind] += stop - start

    def spans(self) -> list[Span]:
        """The newest 10,000 activities of the worker, for a picture."""
        return list(self._spans)

    def snapshot(self) -> dict[str, np.ndarray]:
        """The worker's state between two phases, as a flat dict of arrays."""
        arrays = {f"island|{k}": v for k, v in self.island.snapshot().items()}
        arrays |= self._encoder.snapshot()
        if self._managed is not None:
            own = self._managed.snapshot()
            arrays |= {f"managed|{k}": v for k, v in own.items()}
        phase = (FETCH, TRAIN, PUSH).index(self.phase)
        counts = np.array([self.clock, self._steps, phase], np.int64)
        names = [part.range.name for part in self._slices]
        # A pull may end meanwhile: versions first, as it writes them last.
        versions = [self._versions.get(name, -1) for name in names]
        arrays |= {"counts": counts, "versions": np.array(versions, np.int64)}
        return arrays | {"center": self._center_N.copy()}

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        """Takes the state of a snapshot."""
        own = {k.partition("|")[::2]: np.asarray(v) for k, v in snapshot.items()}
        self.island.restore({k: v for (kind, k), v in own.items() if kind == "island"})
        self._encoder.restore(snapshot)
        if self._managed is not None:
            self._managed.restore(
                {k: v for (kind, k), v in own.items() if kind == "managed"}
            )
        self.clock, self._steps, phase = map(int, snapshot["counts"])
        self._center_N = np.array(snapshot["center"], np.float32)
        names = [part.range.name for part in self._slices]
        versions = map(int, snapshot["versions"])
        self._versions = dict(zip(names, versions, strict=True))
        self.phase = (FETCH, TRAIN, PUSH)[phase]
