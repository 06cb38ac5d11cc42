"""The host of islands, as their program uses it."""

import abc
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from meshpar.errors import MeshparError
from meshpar.islands.worker import Span
from meshpar.multihost.watchdog import HUNG


class StoreLostError(MeshparError):
    """The processes of the store are gone; a launcher may start the run again."""

    exit_code = HUNG


_MOST_STARTS = 5
"""Times that the process of an island may die before it trains."""


class Host(abc.ABC):
    """Islands at work: gives out batches and collects metrics.

    One thread per island waits for its worker, and feeds it: the worker trains in this
    thread, or in another process. The next batch goes to an island that is free and
    does not wait for others.

    Args:
      workers: number of islands.
      own_data: whether the i-th batch of a step is for island i alone.
    """

    def __init__(self, workers: int, own_data: bool = False):
        self.num_workers, self._own_data = workers, own_data
        self.changed = threading.Condition()
        self._batches: list[tuple[int, Any]] = []
        self._results: list[tuple[int, Mapping[str, float]]] = []
        self._done = self._wanted = 0
        self._error: BaseException | None = None
        self._busy = [False] * workers
        self._awaited: list[Callable[[], bool] | None] = [None] * workers
        self._stopped = [True] * workers
        self._threads: list[threading.Thread | None] = [None] * workers

    # What a kind of host does.

    @abc.abstractmethod
    def connect(self, index: int) -> None:
        """Makes the worker of an island, and lets it join the store."""

    @abc.abstractmethod
    def prepare(self, index: int) -> None:
        """Waits until an island needs a batch; raises `Stopped` if it leaves."""

    @abc.abstractmethod
    def train(self, index: int, batch: Any) -> Mapping[str, float]:
        """Trains an island on a batch; returns its metrics."""

    @abc.abstractmethod
    def disconnect(self, index: int) -> None:
        """Takes an island out of the store."""

    @abc.abstractmethod
    def center(self) -> np.ndarray:
        """The store's weights [N]."""

    @property
    @abc.abstractmethod
    def reader(self) -> Callable[[int | None], tuple[int, np.ndarray]]:
        """Reads one version of the store's weights [N], as `Reader.read`."""

    @abc.abstractmethod
    def spans(self) -> list[list[Span]]:
        """The activities of every island."""

    @abc.abstractmethod
    def snapshot(self) -> dict[str, np.ndarray]:
        """The store and all islands as a flat dict; nobody may be at work."""

    # Membership.

    def join(self, index: int) -> None:
        """An island begins, or begins again after it left.

        Raises:
          MeshparError: it is there.
        """
        if not self._stopped[index]:
            raise MeshparError(f"island {index} is at work already")
        self._stopped[index], self._busy[index] = False, True
        name = f"island {index}"
        thread = threading.Thread(
            target=self._run, args=(index,), name=name, daemon=True
        )
        self._threads[index] = thread
        thread.start()

    def leave(self, index: int) -> None:
        """An island leaves after its present batch; the others train on."""
        with self.changed:
            self._stopped[index] = True
            self.changed.notify_all()
        if (thread := self._threads[index]) is not None:
            thread.join()

    def is_stopped(self, index: int) -> bool:
        """Whether an island has left, or has to leave."""
        return self._stopped[index]

    def close(self) -> None:
        """All islands leave."""
        for index in range(self.num_workers):
            self.leave(index)

    # Batches.

    def step(self, parts: Sequence[Any]) -> dict[str, float]:
        """Gives out one batch per island; returns metrics of the finished steps.

        The islands are at most one step behind: the call waits until all batches of
        earlier calls are done, and one new one. With `own_data` nobody trains on the
        batches of an island that has left.

        Raises:
          MeshparError: an island failed.
        """
        with self.changed:
            given = [
                (index, part)
                for index, part in enumerate(parts)
                if not (self._own_data and self._stopped[index])
            ]
            ahead, self._wanted = self._wanted, self._wanted + len(given)
            self._batches.extend(given)
            self.changed.notify_all()
            self._wait(lambda: self._done >= ahead and self._results)
            results, self._results = self._results, []
        return _combined(results, self.num_workers)

    def drain(self) -> None:
        """Waits until all batches are done, and all islands wait."""
        with self.changed:
            self._wait(
                lambda: (
                    self._done >= self._wanted
                    and not any(map(self._is_at_work, range(self.num_workers)))
                )
            )

    def _is_at_work(self, index: int) -> bool:
        """Whether an island does something, or is about to: its wait may be over."""
        awaited = self._awaited[index]
        return self._busy[index] and (awaited is None or awaited())

    def waiting(self, index: int, waits: bool) -> None:
        """Notes that an island waits for others; call it with `changed` held."""
        self._busy[index] = not waits
        self.changed.notify_all()

    def wait_until(self, index: int, condition: Callable[[], bool]) -> None:
        """Lets an island wait for others; call it with `changed` held.

        Args:
          index: the island's.
          condition: of the state that `changed` guards.

        Raises:
          Stopped: the island has to leave.
        """
        self._awaited[index] = condition
        self.changed.notify_all()
        try:
            self.changed.wait_for(lambda: self._stopped[index] or condition())
        finally:
            self._awaited[index] = None
        if self._stopped[index]:
            raise Stopped

    def _wait(self, condition: Any) -> None:
        self.changed.wait_for(lambda: self._error or condition())
        if isinstance(self._error, StoreLostError):
            raise self._error
        if self._error:
            raise MeshparError(f"an island failed: {self._error}") from self._error

    def _run(self, index: int) -> None:
        try:
            self._connect(index)
            while True:
                try:
                    self.prepare(index)
                except WorkerDied:
                    self._reconnect(index)
                    continue
                with self.changed:
                    self.waiting(index, True)
                    self.changed.wait_for(
                        lambda: self._stopped[index] or self._for(index)
                    )
                    if self._stopped[index]:
                        break
                    batch = self._for(index)[0]
                    self._batches.remove(batch)
                    self._busy[index] = True
                self._finish(index, batch)
        except Stopped:
            pass
        except BaseException as error:  # `_wait` raises it in the caller.
            self._error = error
        finally:
            try:
                self.disconnect(index)
            except StoreLostError as error:
                self._error = self._error or error
            with self.changed:
                self._stopped[index] = True
                if self._own_data:
                    self._wanted -= len(self._for(index))
                    self._batches = [b for b in self._batches if b[0] != index]
                self.waiting(index, True)

    def _for(self, index: int) -> list[tuple[int, Any]]:
        """The batches that an island may take."""
        if not self._own_data:
            return self._batches
        return [batch for batch in self._batches if batch[0] == index]

    def _reconnect(self, index: int) -> None:
        """A new worker takes the place of one that died."""
        self.disconnect(index)
        self._connect(index)

    def _connect(self, index: int) -> None:
        for _ in range(_MOST_STARTS):
            try:
                return self.connect(index)
            except WorkerDied:
                self.disconnect(index)
        raise MeshparError(
            f"the process of island {index} died {_MOST_STARTS} times before it could "
            "train; the logs of its host say why"
        )

    def _finish(self, index: int, batch: tuple[int, Any]) -> None:
        try:
            metrics = self.train(index, batch[1])
        except WorkerDied:
            with self.changed:  # Another island trains on it, or the one in its place.
                self._batches.insert(0, batch)
                self.changed.notify_all()
            self._reconnect(index)
            return
        with self.changed:
            self._results.append((index, metrics))
            self._done += 1
            self.changed.notify_all()


class Stopped(Exception):  # noqa: N818
    """An island has to leave while it waits."""


class WorkerDied(Exception):  # noqa: N818
    """The process of an island is gone."""


def _combined(
    results: Sequence[tuple[int, Mapping[str, float]]], workers: int
) -> dict[str, float]:
    """Means over batches, and times and ages of every island."""
    weights = [found.get("weight", 1.0) for _, found in results]
    combined = {}
    own = ("age", "clock", "wait_seconds", "compute_seconds")
    for name in results[0][1]:
        values = [found[name] for _, found in results]
        if name in own:
            continue
        if name in ("weight", "pushed_bytes", "pulled_bytes"):
            combined[name] = sum(values)
        else:
            pairs = zip(values, weights, strict=True)
            combined[name] = sum(v * w for v, w in pairs) / sum(weights)
    for index in range(workers):
        mine = [found for i, found in results if i == index]
        for name in own if mine else ():
            values = [found[name] for found in mine]
            adds = name.endswith("seconds")
            combined[f"{name}/{index}"] = sum(values) if adds else values[-1]
    return combined
