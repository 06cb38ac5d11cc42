"""Chain replication: one server's copies of ranges, and its place in their chains.

The head of a range's chain orders the operations, every server applies them and sends
them on to its successor, and acknowledgements come back from the tail. A new view of
the membership begins with a copy of each range, from the source that the coordinator
chose, down the chain.

Source: van Renesse and Schneider, Chain replication, OSDI 2004.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from meshpar.islands.key_range import KeyRange
from meshpar.islands.messages import (
    COORDINATOR,
    HOST,
    Acked,
    Forward,
    Install,
    Installed,
    Operation,
    Prepared,
    QuorumReached,
    Send,
    Synced,
    View,
)
from meshpar.islands.range_state import RangeState
from meshpar.islands.rules import Rules


@dataclasses.dataclass
class Replica:
    """One server's copy of a range.

    Attributes:
      state: the range.
      sequence: operations applied.
      synced: the epoch in which the copy was installed.
      acked: operations that everything downstream has; None before it is installed.
      log: {sequence: operation} of those that are not acked.
      early: {sequence: operation} of those that overtook an earlier one.
    """

    state: RangeState
    sequence: int = 0
    synced: int = 0
    acked: int | None = None
    log: dict[int, Operation] = dataclasses.field(default_factory=dict)
    early: dict[int, Operation] = dataclasses.field(default_factory=dict)


class Chains:
    """A server's copies of ranges, as a state machine.

    Args:
      server: name of the server.
      ranges: all ranges of the store.
      rules: the store's.

    Attributes:
      view: the view under which the server works.
    """

    def __init__(self, server: str, ranges: Sequence[KeyRange], rules: Rules):
        self.view = View(0, {}, {})
        self._server, self._rules = server, rules
        self._ranges = {key_range.name: key_range for key_range in ranges}
        self._prepared = 0
        self._replicas: dict[str, Replica] = {}
        self._announced: dict[str, int] = {}

    @property
    def frozen(self) -> bool:
        """Whether a newer view is being prepared."""
        return self._prepared > self.view.epoch

    def replica(self, name: str) -> Replica | None:
        """The copy of a range, if it is in place under the present view."""
        replica = self._replicas.get(name)
        if replica and replica.synced == self.view.epoch and not self.frozen:
            return replica
        return None

    def is_head(self, name: str) -> bool:
        """Whether this server orders the operations of a range."""
        return self.view.chains[name][0] == self._server

    def is_tail(self, name: str) -> bool:
        """Whether this server answers the pulls of a range."""
        return self.view.chains[name][-1] == self._server

    def apply(self, name: str, operation: Operation) -> list[Send]:
        """Applies the next operation of a range, and sends it on.

        Raises:
          RefusedError: the range does not take it.
        """
        replica = self._replicas[name]
        replica.state.apply(operation)
        replica.sequence += 1
        sends = []
        if self.is_tail(name):
            replica.acked = replica.sequence
        else:
            replica.log[replica.sequence] = operation
            sends = self.forward(name, [replica.sequence])
        return sends + self.announce(name)

    def announce(self, name: str) -> list[Send]:
        """Tells the host once that the open round has its quorum; at the head alone."""
        state = self._replicas[name].state
        if not (self.is_head(name) and state.has_quorum()):
            return []
        if self._announced.get(name, -1) >= state.round:
            return []
        self._announced[name] = state.round
        return [Send(HOST, QuorumReached(name, state.round))]

    def forward(self, name: str, sequences: Iterable[int] | None = None) -> list[Send]:
        """Sends operations to the successor; by default all that are not acked."""
        replica = self._replicas[name]
        if self.is_tail(name) or replica.acked is None:
            return []
        successor, epoch, log = self._neighbour(name, 1), self.view.epoch, replica.log
        return [
            Send(successor, Forward(epoch, name, number, log[number]))
            for number in (log if sequences is None else sequences)
        ]

    def handle(self, message: Any) -> list[Send]:
        """Handles a message of the predecessor or successor, of the present epoch."""
        if message.epoch != self.view.epoch or self.frozen:
            return []
        name = message.range
        if isinstance(message, Install):
            return self._install(message)
        if (replica := self.replica(name)) is None:
            return []
        match message:
            case Forward():
                return self._forwarded(replica, message)
            case Installed(_, _, sequence):
                first = replica.acked is None
                self._ack(replica, sequence)
                return self._report(name, first) + (self.forward(name) if first else [])
            case Acked(_, _, sequence):
                if replica.acked is None:
                    return []
                self._ack(replica, sequence)
                return self._report(name, False)
        raise AssertionError(message)

    def prepare(self, epoch: int) -> list[Send]:
        """Stops the work of earlier views, and reports the ranges of this server."""
        if epoch <= self.view.epoch:
            return []
        self._prepared = max(self._prepared, epoch)
        holds = {name: (r.synced, r.sequence) for name, r in self._replicas.items()}
        return [Send(COORDINATOR, Prepared(epoch, self._server, holds))]

    def adopts(self, view: View) -> bool:
        """Whether a view is not older than what this server knows."""
        return view.epoch >= max(self._prepared, self.view.epoch)

    def adopt(self, view: View) -> list[Send]:
        """Adopts a view; repeats requests for ranges that are not in place yet."""
        if view.epoch > self.view.epoch:
            self.view, self._prepared = view, view.epoch
            self._announced = {}
            for replica in self._replicas.values():
                replica.log, replica.early, replica.acked = {}, {}, None
                replica.state.drop_gathered()
        sends = []
        for name, chain in view.chains.items():
            is_source = view.sources.get(name) == self._server
            if self.is_head(name) and (is_source or name not in view.sources):
                if name not in view.sources and name not in self._replicas:
                    state = RangeState(self._ranges[name], self._rules)
                    self._replicas[name] = Replica(state)
                self._replicas[name].synced = view.epoch
                sends += self._placed(name)
            elif is_source and name in self._replicas:
                sends.append(self._copy(name, chain[0]))
            elif self._server in chain and self.replica(name):
                sends += self._placed(name)
        return sends

    def settle(self, epoch: int) -> None:
        """Drops the copies of ranges that this view gives to others."""
        if epoch == self.view.epoch and not self.frozen:
            for name in list(self._replicas):
                if self._server not in self.view.chains[name]:
                    del self._replicas[name]

    def _neighbour(self, name: str, offset: int) -> str:
        chain = self.view.chains[name]
        return chain[chain.index(self._server) + offset]

    def _ack(self, replica: Replica, sequence: int) -> None:
        replica.acked = max(replica.acked or 0, sequence)
        for number in [n for n in replica.log if n <= replica.acked]:
            del replica.log[number]

    def _forwarded(self, replica: Replica, message: Forward) -> list[Send]:
        name, sequence = message.range, message.sequence
        if sequence <= replica.sequence:
            sends = self.forward(name)
        else:
            replica.early[sequence], sends = message.operation, []
            while (next_one := replica.sequence + 1) in replica.early:
                sends += self.apply(name, replica.early.pop(next_one))
        if replica.acked is not None and replica.acked >= sequence:
            sends += self._report(name, False)
        return sends

    def _report(self, name: str, installed: bool) -> list[Send]:
        """Tells the predecessor how far everything from here on is."""
        epoch, acked = self.view.epoch, self._replicas[name].acked
        if self.is_head(name):
            return [Send(COORDINATOR, Synced(epoch, name))] if installed else []
        kind = Installed if installed else Acked
        return [Send(self._neighbour(name, -1), kind(epoch, name, acked))]

    def _copy(self, name: str, to: str) -> Send:
        replica = self._replicas[name]
        snapshot = replica.state.snapshot()
        return Send(to, Install(self.view.epoch, name, replica.sequence, snapshot))

    def _install(self, message: Install) -> list[Send]:
        name = message.range
        if self.replica(name) is None:
            state = RangeState(self._ranges[name], self._rules)
            state.restore(message.state)
            self._replicas[name] = Replica(state, message.sequence, message.epoch)
        return self._placed(name)

    def _placed(self, name: str) -> list[Send]:
        """Goes on with a range that is in place here: copies it on, or reports it."""
        replica = self._replicas[name]
        if self.is_tail(name):
            replica.acked = replica.sequence
        elif replica.acked is None:
            return [self._copy(name, self._neighbour(name, 1))]
        return self._report(name, True)
