"""The coordinator of the store: which servers there are, and which chain holds a range.

A change of the membership makes a new view in three steps: all servers stop the work of
the old view and say what they hold; the coordinator takes the newest copy of each range
as its source; the sources' states are copied down the new chains. Any server that held
a range when an operation was answered has that operation, so a new view keeps all of
them while one replica of each range survives.

Source: van Renesse and Schneider, Chain replication, OSDI 2004, section 3 (the master).
"""

from collections.abc import Sequence
from typing import Any

from meshpar.errors import MeshparError
from meshpar.islands.hash_ring import chains
from meshpar.islands.messages import (
    Adopt,
    AskView,
    Moved,
    Prepare,
    Prepared,
    Send,
    Settled,
    Synced,
    View,
)


class RangeLostError(MeshparError):
    """All replicas of a range are gone."""


class Coordinator:
    """Makes views, as a state machine; it holds no values.

    Args:
      ranges: names of the ranges.
      replicas: servers that hold a range.

    Attributes:
      view: the newest view; requests use its epoch and chains.
      settled: whether all ranges are in place.
    """

    def __init__(self, ranges: Sequence[str], replicas: int):
        self._ranges, self._replicas = tuple(ranges), replicas
        self._servers: set[str] = set()
        self._leaving: set[str] = set()
        self._epoch = 0
        self._prepared: dict[str, Prepared] = {}
        self._synced: set[str] = set()
        self._started = False
        self.view = View(0, {}, {})
        self.settled = False

    @property
    def servers(self) -> list[str]:
        """Names of the servers that hold ranges."""
        return sorted(self._servers)

    def change(
        self,
        joins: Sequence[str] = (),
        leaves: Sequence[str] = (),
        dead: Sequence[str] = (),
    ) -> list[Send]:
        """Begins a new view.

        Args:
          joins: new servers.
          leaves: servers that give up their ranges; they are needed until `settled`.
          dead: servers that answer no more.

        Raises:
          RangeLostError: the last server is dead.
          MeshparError: nobody would be left.
        """
        self._servers |= set(joins)
        self._leaving |= set(leaves)
        self._leaving -= set(dead)
        self._servers -= set(leaves) | set(dead)
        if not self._servers:
            if dead and not self._leaving:
                raise RangeLostError(
                    "all servers are gone; resume from a checkpoint, with more replicas"
                )
            raise MeshparError("the store needs a server: let another one join first")
        self._epoch += 1
        self._prepared, self._synced, self.settled = {}, set(), False
        return self.tick()

    def tick(self) -> list[Send]:
        """Repeats messages that have not been answered."""
        everybody = sorted(self._servers | self._leaving)
        if self.settled:
            return []
        if self.view.epoch == self._epoch:
            return [Send(server, Adopt(self.view)) for server in everybody]
        return [
            Send(server, Prepare(self._epoch))
            for server in everybody
            if server not in self._prepared
        ]

    def handle(self, message: Any) -> list[Send]:
        """Handles the answer of a server, or the question of a client.

        Raises:
          RangeLostError: no server holds a range that had been in the store.
        """
        if isinstance(message, AskView):
            return [Send(message.client, Moved(self.view))]
        if message.epoch != self._epoch or self.settled:
            return []
        if isinstance(message, Prepared) and self.view.epoch < self._epoch:
            self._prepared[message.server] = message
            if set(self._prepared) >= self._servers | self._leaving:
                return self._make_view()
        if isinstance(message, Synced):
            self._synced.add(message.range)
            if self._synced >= set(self._ranges):
                self.settled = self._started = True
                sends = [Send(s, Settled(self._epoch)) for s in self.servers]
                self._leaving = set()
                return sends
        return []

    def _make_view(self) -> list[Send]:
        sources = {}
        for name in self._ranges:
            held = {
                prepared.holds[name]: server
                for server, prepared in sorted(self._prepared.items())
                if name in prepared.holds
            }
            if held:
                sources[name] = held[max(held)]
            elif self._started:
                raise RangeLostError(
                    f"range {name}: all servers that held it are gone; resume from a "
                    "checkpoint, with more replicas"
                )
        placed = chains(self._ranges, self._servers, self._replicas)
        self.view = View(self._epoch, placed, sources)
        return self.tick()
