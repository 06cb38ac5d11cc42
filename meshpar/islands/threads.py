"""Host of islands in threads of this process, around one `Store`."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from meshpar.islands.algorithms import make_island, mode_decoders, server_update
from meshpar.islands.host import Host
from meshpar.islands.island_program import island_program
from meshpar.islands.messages import Payload, QuorumReached, Values
from meshpar.islands.mode import Islands
from meshpar.islands.store import Store
from meshpar.islands.weights_vector import WeightsVector, weights_vector
from meshpar.islands.worker import Span, Worker
from meshpar.lowering.train_program import TrainProgram


def make_store(mode: Islands, vector: WeightsVector) -> Store:
    """The store of a mode, with the weights cut into its ranges."""
    return Store(
        [part.range for part in vector.slices(mode.ranges)],
        mode.consistency,
        server_update(mode),
        servers=mode.servers,
        replicas=mode.replicas,
        quorum=mode.quorum or None,
        grace=mode.grace,
        decoders=mode_decoders(mode),
        history=mode.history,
    )


class _Endpoint:
    """A worker's way to the store: waits on the host's condition."""

    def __init__(self, host: "Threads", index: int, name: str):
        self._host, self._index, self._name = host, index, name

    def pull(
        self, names: list[str], clock: int, known: Mapping[str, int]
    ) -> list[Values]:
        host, store = self._host, self._host.store

        def ready() -> bool:
            return all(store.ready(name, self._name, clock) for name in names)

        with host.changed:
            host.wait_until(self._index, ready)
            return [
                store.pull(name, self._name, clock, known=known.get(name, -1))
                for name in names
            ]

    def push(self, clock: int, payloads: Mapping[str, Payload]) -> None:
        with self._host.changed:
            for name, payload in payloads.items():
                self._host.store.push(name, self._name, clock, payload)
            self._host.start_graces()
            self._host.changed.notify_all()


class Threads(Host):
    """Islands in threads; each trains on devices of its own.

    Args:
      mode: the mode.
      programs: one program per island.
      start: leaves of the training state that islands start from, on the host.
      center_N: the store's first weights.
      snapshot: the store and the islands as `snapshot` gave them, to go on from.

    Attributes:
      store: the store; hold `changed` while you use it.
    """

    def __init__(
        self,
        mode: Islands,
        programs: list[TrainProgram],
        start: Sequence[np.ndarray],
        center_N: np.ndarray,
        snapshot: Mapping[str, np.ndarray] | None = None,
    ):
        super().__init__(len(programs), mode.own_data)
        self._mode, self._programs, self._start = mode, programs, start
        self._vector = weights_vector(programs[0])
        self._slices = self._vector.slices(mode.ranges)
        self.store = make_store(mode, self._vector)
        self._workers: list[Worker | None] = [None] * len(programs)
        self._past: list[list[Span]] = [[] for _ in programs]
        self._names: dict[int, str] = {}
        self._births = 0
        if snapshot is None:
            for part in self._slices:
                self.store.set_values(part.range.name, center_N[part.start : part.stop])
            first = range(1 if mode.warm_start else self.num_workers)
            for index in first:
                self._names[index] = self._new_name(index)
                self.store.join(self._names[index])
        else:
            self._restore(snapshot)
        for index in range(self.num_workers):
            self.join(index)

    def _new_name(self, index: int) -> str:
        self._births += 1
        return f"island {index}, {self._births}"

    def _make_worker(self, index: int, name: str, clock: int) -> Worker:
        program = island_program(self._programs[index], self._mode)
        island = make_island(program, self._mode, self._start)
        endpoint = _Endpoint(self, index, name)
        return Worker(name, island, self._mode, self._slices, endpoint, clock)

    def connect(self, index: int) -> None:
        """Makes a new member of the store, unless it is one already."""
        if self._workers[index] is not None:
            return
        with self.changed:
            clock = 0
            if index not in self._names:
                self._wait_for_warm_start(index)
                name = self._names[index] = self._new_name(index)
                clock = self.store.join(name)
                self.changed.notify_all()
        self._workers[index] = self._make_worker(index, self._names[index], clock)

    def _wait_for_warm_start(self, index: int) -> None:
        """Waits until the first island has made enough steps alone."""
        pushes = -(-self._mode.warm_start // self._mode.push)
        name = self._slices[0].range.name

        def warm() -> bool:
            return max(self.store.clocks(name).values(), default=0) >= pushes

        self.wait_until(index, warm)

    def prepare(self, index: int) -> None:
        self._workers[index].prepare()

    def train(self, index: int, batch: Any) -> Mapping[str, float]:
        return self._workers[index].train(batch)

    def disconnect(self, index: int) -> None:
        with self.changed:
            if (name := self._names.pop(index, None)) is not None:
                self.store.leave(name)
            if (worker := self._workers[index]) is not None:
                self._past[index] += worker.spans()
                self._workers[index] = None
            self.start_graces()
            self.changed.notify_all()

    def start_graces(self) -> None:
        """Starts the grace windows of rounds that got their quorum."""
        for quorum in self.store.take_quorums():
            timer = threading.Timer(self._mode.grace, self._close, (quorum,))
            timer.daemon = True
            timer.start()

    def _close(self, quorum: QuorumReached) -> None:
        with self.changed:
            self.store.close(quorum)
            self.start_graces()
            self.changed.notify_all()

    def with_store(self, action: Callable[[Store], Any]) -> Any:
        """Calls a function of the store while nobody else uses it."""
        with self.changed:
            result = action(self.store)
            self.changed.notify_all()
        return result

    def center(self) -> np.ndarray:
        with self.changed:
            parts = [self.store.pull(part.range.name) for part in self._slices]
        return np.concatenate([part.values for part in parts])

    def _read(self, version: int | None = None) -> tuple[int, np.ndarray]:
        with self.changed:
            version, found = self.store.pull_version(version)
        parts = [found[part.range.name] for part in self._slices]
        return version, np.concatenate(parts)

    @property
    def reader(self) -> Callable[[int | None], tuple[int, np.ndarray]]:
        return self._read

    def spans(self) -> list[list[Span]]:
        return [
            past + (worker.spans() if worker else [])
            for past, worker in zip(self._past, self._workers, strict=True)
        ]

    def snapshot(self) -> dict[str, np.ndarray]:
        with self.changed:
            arrays = {f"store|{k}": v for k, v in self.store.snapshot().items()}
            for index, worker in enumerate(self._workers):
                if worker is not None:
                    own = worker.snapshot().items()
                    arrays |= {f"{index}|{k}": v for k, v in own}
        meta = json.dumps([self._births, self._names]).encode()
        return arrays | {"names": np.frombuffer(meta, np.uint8)}

    def _restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        parts: dict[str, dict[str, np.ndarray]] = {}
        for key, array in snapshot.items():
            kind, _, rest = key.partition("|")
            parts.setdefault(kind, {})[rest] = array
        self.store.restore(parts["store"])
        self._births, names = json.loads(parts["names"][""].tobytes())
        for index, name in names.items():
            self._names[int(index)] = name
            worker = self._make_worker(int(index), name, 0)
            worker.restore(parts[index])
            self._workers[int(index)] = worker
