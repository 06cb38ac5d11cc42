"""A client of the store's servers in Ray: waits, and asks again when a server dies."""

import dataclasses
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from meshpar.errors import MeshparError
from meshpar.islands.coordinator import RangeLostError
from meshpar.islands.host import StoreLostError
from meshpar.islands.messages import (
    Done,
    Moved,
    Operation,
    Payload,
    Pull,
    Push,
    Request,
    Values,
)
from meshpar.islands.store import chosen_version

_RETRY_S = 2.0
"""Seconds after which a request is repeated: the server may have ignored it."""

_READS = 20
"""Times that the newest version is looked up and read, before it counts as gone."""

_GONE = (
    ray.exceptions.RayActorError,
    ray.exceptions.RayTaskError,
    ray.exceptions.ObjectLostError,
)
"""Errors of Ray for a server that is dead, or cannot be reached for now."""

_LOST = (
    *(ray.exceptions.RayActorError, ray.exceptions.ObjectLostError),
    *(ray.exceptions.NodeDiedError, ray.exceptions.LocalRayletDiedError),
    *(ray.exceptions.RaySystemError, ray.exceptions.WorkerCrashedError),
)
"""Errors of Ray for what it cannot bring back: the coordinator, or Ray itself."""


def result(ref: Any, timeout: float | None = None) -> Any:
    """The result of an actor's method.

    Raises:
      StoreLostError: its process is gone, or Ray is, or the last copy of a range.
      TimeoutError: it takes longer.
    """
    try:
        return ray.get(ref, timeout=timeout)
    except _LOST as error:
        raise _lost(error) from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RangeLostError):
            raise _lost(error.cause) from error
        raise


def _lost(error: Exception) -> StoreLostError:
    why = str(error).strip().split("\n")[0]
    return StoreLostError(
        f"the store of the islands is lost ({why}); run the same command again: it "
        "goes on from the last complete checkpoint"
    )


class RayClient:
    """A client; each thread needs one of its own.

    Args:
      name: unique among the clients.
      coordinator: the handle of the `Coordination` actor.
    """

    def __init__(self, name: str, coordinator: Any):
        self._name, self._coordinator = name, coordinator
        self._requests = 0
        self._refresh()

    def operate(self, operations: list[Operation]) -> None:
        """Sends operations; returns when all replicas have them.

        Raises:
          MeshparError: the store refuses one.
        """

        def message(i: int) -> tuple[str, Callable[[int, int], Any]]:
            operation = operations[i]
            head = self._view.chains[operation.range][0]
            return head, lambda request, epoch: Request(
                self._name, request, epoch, operation
            )

        self._ask(len(operations), message)

    def read(self, reads: list[tuple]) -> list[Values]:
        """Reads ranges: fields of `Pull` from `range` on; waits as they want it."""

        def message(i: int) -> tuple[str, Callable[[int, int], Any]]:
            tail = self._view.chains[reads[i][0]][-1]
            return tail, lambda request, epoch: Pull(
                self._name, request, epoch, *reads[i]
            )

        return self._ask(len(reads), message)

    def pull(
        self, worker: str, names: list[str], clock: int, known: Mapping[str, int]
    ) -> list[Values]:
        """Reads whole ranges at a worker's clock."""
        return self.read(
            [(name, worker, clock, None, known.get(name, -1)) for name in names]
        )

    def push(self, worker: str, clock: int, payloads: Mapping[str, Payload]) -> None:
        """Pushes to ranges at a worker's clock."""
        self.operate(
            [Push(name, worker, clock, payload) for name, payload in payloads.items()]
        )

    def slowest(self, names: Sequence[str]) -> int:
        """The largest of the ranges' slowest clocks."""
        return max(values.slowest for values in self._looks(names))

    def pull_version(
        self, names: Sequence[str], version: int | None
    ) -> tuple[int, list[np.ndarray]]:
        """Reads ranges at one version; None is the newest that all have reached.

        Raises:
          MeshparError: a version that a range has not reached, or does not keep.
        """
        for tries in range(_READS):
            reached = min(values.version for values in self._looks(names))
            chosen = chosen_version(version, reached)
            try:
                found = self.read([(n, "", 0, None, -1, chosen) for n in names])
                return chosen, [values.values for values in found]
            except MeshparError as error:
                # Islands that train may have pushed it out of the history meanwhile.
                if version is not None or tries == _READS - 1:
                    raise MeshparError(f"{error}; use a larger history") from error
        raise AssertionError(names)

    def _looks(self, names: Sequence[str]) -> list[Values]:
        """Versions and clocks of ranges, without their values."""
        nothing = np.zeros(0, np.int64)
        return self.read([(name, "", 0, nothing) for name in names])

    def _ask(self, count: int, message: Callable) -> list[Done | Values]:
        """Sends requests at once; repeats those without an answer."""
        first = self._requests
        self._requests += count
        answers: dict[int, Done | Values] = {}
        while len(answers) < count:
            refs = {}
            for i in range(count):
                if i not in answers:
                    server, make = message(i)
                    if (handle := self._handles.get(server)) is not None:
                        request = make(first + i, self._view.epoch)
                        refs[handle.ask.remote(request)] = i, server
            if not refs:
                time.sleep(0.1)
            elif self._collect(refs, answers):
                continue
            self._refresh()
        for answer in answers.values():
            if answer.refused:
                raise MeshparError(answer.refused)
        return [answers[i] for i in range(count)]

    def _refresh(self) -> None:
        """Asks for the newest view.

        Raises:
          StoreLostError: there is none.
        """
        self._view, self._handles = result(self._coordinator.view.remote())

    def _collect(self, refs: dict, answers: dict[int, Done | Values]) -> bool:
        """Waits for answers; returns whether all came."""
        pending, deadline, complete = list(refs), time.monotonic() + _RETRY_S, True
        while pending:
            left = max(0.0, deadline - time.monotonic())
            ready, pending = ray.wait(pending, timeout=left)
            if not ready:
                return False
            i, server = refs[ready[0]]
            try:
                answer = ray.get(ready[0])
                if isinstance(getattr(answer, "values", None), ray.ObjectRef):
                    answer = answer._replace(values=ray.get(answer.values))
            except _GONE:
                result(self._coordinator.report.remote(server))
                return False
            if answer is None or isinstance(answer, Moved):
                complete = False
            else:
                answers[i] = answer
        return complete


@dataclasses.dataclass(frozen=True)
class RayReads:
    """Reads versions of the weights from any process of the cluster.

    Attributes:
      coordinator: the handle of the `Coordination` actor.
      ranges: of the weights, in order.
    """

    coordinator: Any
    ranges: tuple[str, ...]

    def __call__(self, version: int | None = None) -> tuple[int, np.ndarray]:
        client = RayClient(f"reader {uuid.uuid4().hex}", self.coordinator)
        version, parts = client.pull_version(self.ranges, version)
        return version, np.concatenate(parts)
