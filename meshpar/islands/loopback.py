"""Servers and coordinator of a store in one process; messages arrive at once."""

import collections
from collections.abc import Mapping, Sequence

import numpy as np

from meshpar.errors import MeshparError
from meshpar.islands.coordinator import Coordinator
from meshpar.islands.key_range import KeyRange
from meshpar.islands.messages import (
    COORDINATOR,
    HOST,
    Done,
    Moved,
    Operation,
    Pull,
    QuorumReached,
    Request,
    Send,
    Values,
    View,
)
from meshpar.islands.node import Node
from meshpar.islands.range_state import RangeState
from meshpar.islands.rules import Rules

_CLIENT = "client"


class Loopback:
    """The servers of a store, and one client of theirs.

    Args:
      ranges: all ranges of the store.
      rules: its rules.
      replicas: servers that hold a range.
    """

    def __init__(self, ranges: Sequence[KeyRange], rules: Rules, replicas: int):
        self._ranges, self._rules = list(ranges), rules
        self._coordinator = Coordinator([r.name for r in ranges], replicas)
        self._nodes: dict[str, Node] = {}
        self._answers: dict[int, Done | Values] = {}
        self._open: dict[int, Request] = {}  # Pushes that wait for their rounds.
        self._quorums: list[QuorumReached] = []
        self._used: set[str] = set()
        self._requests = 0

    @property
    def names(self) -> list[str]:
        """Names of the servers."""
        return self._coordinator.servers

    @property
    def view(self) -> View:
        """The current view: which servers hold each range."""
        return self._coordinator.view

    def state(self, name: str) -> RangeState:
        """The state of a range at its tail."""
        return self._nodes[self.view.chains[name][-1]].state(name)

    def restore(self, name: str, snapshot: Mapping[str, np.ndarray]) -> None:
        """Puts the state of a snapshot into all replicas of a range."""
        for server in self.view.chains[name]:
            self._nodes[server].restore(name, snapshot)
        self._open = {k: r for k, r in self._open.items() if r.operation.range != name}

    def take_quorums(self) -> list[QuorumReached]:
        """Rounds with a new quorum since the last call."""
        quorums, self._quorums = self._quorums, []
        return quorums

    def operate(self, operation: Operation) -> Done | None:
        """Sends an operation; None if it came too early.

        A push that waits for its round is done as well: it is repeated here until the
        store answers it.
        """
        self._requests += 1
        message = Request(_CLIENT, self._requests, self.view.epoch, operation)
        head = self.view.chains[operation.range][0]
        answer = self._ask(head, message)
        if answer is None and self._nodes[head].waits(message):
            self._open[message.request] = message
            return Done(message.request)
        return answer

    def pull(
        self,
        name: str,
        worker: str,
        clock: int,
        keys: np.ndarray | None,
        known: int,
        version: int = -1,
    ) -> Values:
        """Sends a pull that need not wait."""
        self._requests += 1
        epoch = self.view.epoch
        read = name, worker, clock, keys, known, version
        message = Pull(_CLIENT, self._requests, epoch, *read)
        return self._ask(self.view.chains[name][-1], message)

    def change(
        self,
        joins: Sequence[str] = (),
        leaves: Sequence[str] = (),
        dead: Sequence[str] = (),
    ) -> None:
        """Changes the membership of servers, as `Coordinator.change`.

        Raises:
          MeshparError: the name of a server that joins is not new.
        """
        for server in joins:
            if server in self._used:
                raise MeshparError(f"server {server} was here before: use a new name")
            self._used.add(server)
            self._nodes[server] = Node(server, self._ranges, self._rules)
        for server in dead:
            del self._nodes[server]
        self._deliver(self._coordinator.change(joins, leaves, dead))
        for server in leaves:
            del self._nodes[server]
        epoch, chains = self.view.epoch, self.view.chains
        for message in list(self._open.values()):
            head = chains[message.operation.range][0]
            self._deliver([Send(head, message._replace(epoch=epoch))])

    def _ask(self, server: str, message: Request | Pull) -> Done | Values | None:
        self._deliver([Send(server, message)])
        return self._answers.pop(message.request, None)

    def _deliver(self, sends: list[Send]) -> None:
        queue = collections.deque(sends)
        while queue:
            to, message = queue.popleft()
            if to == COORDINATOR:
                queue.extend(self._coordinator.handle(message))
            elif to == HOST:
                self._quorums.append(message)
            elif to == _CLIENT and not isinstance(message, Moved):
                if self._open.pop(message.request, None) is None:
                    self._answers[message.request] = message
            elif to == _CLIENT:
                continue  # `change` repeats what is open.
            else:
                queue.extend(self._nodes[to].handle(message))
