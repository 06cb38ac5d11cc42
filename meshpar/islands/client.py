"""A client of the store's servers: repeats its requests until they are answered."""

from typing import Any, NamedTuple

import numpy as np

from meshpar.islands.messages import (
    COORDINATOR,
    AskView,
    Done,
    Moved,
    Operation,
    Pull,
    Request,
    Send,
    Values,
    View,
)


class _Read(NamedTuple):
    """The request of a pull; the fields of `Pull`."""

    range: str
    worker: str
    clock: int
    keys: np.ndarray | None
    known: int
    version: int


class Client:
    """A client, as a state machine; several requests may be open at once.

    Args:
      name: the client's address.
      view: the newest view known; `retry` asks for a newer one.
    """

    def __init__(self, name: str, view: View):
        self._name, self._view = name, view
        self._open: dict[int, Operation | _Read] = {}
        self._requests = 0

    @property
    def waits(self) -> bool:
        """Whether a request is not answered yet."""
        return bool(self._open)

    def operate(self, operation: Operation) -> list[Send]:
        """Sends an operation to the head of its range."""
        return self._ask(operation)

    def pull(
        self,
        name: str,
        worker: str = "",
        clock: int = 0,
        keys: np.ndarray | None = None,
        known: int = -1,
        version: int = -1,
    ) -> list[Send]:
        """Sends a pull to the tail of a range, as `Store.pull`."""
        return self._ask(_Read(name, worker, clock, keys, known, version))

    def handle(self, message: Any) -> tuple[Done | Values | None, list[Send]]:
        """Handles an answer; returns it if it is the first to an open request."""
        if isinstance(message, Moved):
            if message.view.epoch <= self._view.epoch:
                return None, []
            self._view = message.view
            return None, self._repeat()
        if self._open.pop(message.request, None) is None:
            return None, []
        return message, []

    def retry(self) -> list[Send]:
        """Repeats all open requests, and asks whether there is a newer view."""
        if not self._open:
            return []
        return [Send(COORDINATOR, AskView(self._name)), *self._repeat()]

    def _ask(self, request: Operation | _Read) -> list[Send]:
        self._requests += 1
        self._open[self._requests] = request
        return self._send(self._requests, request)

    def _repeat(self) -> list[Send]:
        return [
            send
            for number, request in self._open.items()
            for send in self._send(number, request)
        ]

    def _send(self, number: int, request: Operation | _Read) -> list[Send]:
        chain, epoch = self._view.chains.get(request.range), self._view.epoch
        if chain is None:
            return []  # No view yet; `retry` asks for one.
        if isinstance(request, _Read):
            return [Send(chain[-1], Pull(self._name, number, epoch, *request))]
        return [Send(chain[0], Request(self._name, number, epoch, request))]
