"""A server of the store: answers the operations and pulls of its clients.

The head of a range takes operations, and answers them when all replicas have them. The
tail answers pulls, so nobody reads what could still be lost.

With `Rules.aggregate` the head gathers the pushes of a round, and one average travels
down the chain in place of them. Until all replicas have it no push is answered. If the
head dies, the workers repeat their pushes to the next head: the average carries the ids
of its pushes, so those that it holds are known there, and the others are gathered anew.

Nothing here waits or looks at a clock: a host delivers messages to `handle`, and
delivers what it returns. Messages may come late, twice, in any order or not at all,
because clients and the coordinator repeat theirs until they are answered.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from meshpar.islands.chain import Chains
from meshpar.islands.key_range import KeyRange
from meshpar.islands.messages import (
    Adopt,
    Close,
    Done,
    Moved,
    Prepare,
    Pull,
    Push,
    Request,
    Send,
    Settled,
    Values,
    View,
)
from meshpar.islands.range_state import RangeState
from meshpar.islands.rules import RefusedError, Rules


class Node:
    """A server of the store, as a state machine.

    Args:
      name: unique among all servers there ever are.
      ranges: all ranges of the store.
      rules: the store's.
      copies: whether answers hold copies of the values; without it a host copies them
        before it hands in the next message.
    """

    def __init__(
        self,
        name: str,
        ranges: Sequence[KeyRange],
        rules: Rules,
        copies: bool = True,
    ):
        self.name, self._copies, self._rules = name, copies, rules
        self._chains = Chains(name, ranges, rules)
        self._pulls: dict[tuple[str, int], Pull] = {}
        self._waiting: dict[str, dict[tuple[str, int], int]] = {
            key_range.name: {} for key_range in ranges
        }
        # Requests whose push is gathered for its round: {range: {request: push}}.
        self._gathered: dict[str, dict[tuple[str, int], tuple[str, int]]] = {
            key_range.name: {} for key_range in ranges
        }

    def handle(self, message: Any) -> list[Send]:
        """Handles one message; returns those to deliver."""
        match message:
            case Request():
                return self._request(message)
            case Pull():
                return self._pull(message)
            case Prepare(epoch):
                return self._chains.prepare(epoch)
            case Adopt(view):
                return self._adopt(view)
            case Settled(epoch):
                self._chains.settle(epoch)
                return []
        return self._chains.handle(message) + self._progress(message.range)

    def state(self, name: str) -> RangeState | None:
        """The state of a range, if it is in place on this server."""
        replica = self._chains.replica(name)
        return replica.state if replica else None

    def waits(self, message: Request | Pull) -> bool:
        """Whether a request waits here; if not, it has been answered or ignored."""
        key = message.client, message.request
        if isinstance(message, Pull):
            return key in self._pulls
        name = message.operation.range
        return key in self._waiting[name] or key in self._gathered[name]

    def restore(self, name: str, snapshot: Mapping[str, Any]) -> None:
        """Puts the state of a snapshot into this server's copy of a range."""
        if (state := self.state(name)) is not None:
            state.restore(snapshot)
            self._gathered[name].clear()

    def _request(self, request: Request) -> list[Send]:
        """Applies an operation once; answers when all replicas have it."""
        if request.epoch < self._chains.view.epoch:
            return [Send(request.client, Moved(self._chains.view))]
        operation, name = request.operation, request.operation.range
        replica = self._chains.replica(name)
        if replica is None or not self._chains.is_head(name):
            return []
        if replica.state.early(operation):
            return []
        key = request.client, request.request
        try:
            if replica.state.duplicate(operation):
                sends = self._chains.forward(name)
            elif self._rules.aggregate and isinstance(operation, Push):
                replica.state.gather(operation)
                self._gathered[name][key] = operation.worker, operation.clock
                return self._progress(name) + self._chains.announce(name)
            elif self._rules.aggregate and isinstance(operation, Close):
                sends = self._close_rounds(name, operation.round)
            else:
                sends = self._chains.apply(name, operation)
        except RefusedError as problem:
            return [Send(request.client, Done(request.request, str(problem)))]
        self._waiting[name][key] = replica.sequence
        return sends + self._progress(name)

    def _close_rounds(self, name: str, grace_over: int | None = None) -> list[Send]:
        """Sends the aggregates of rounds that are complete; at the head alone."""
        if not (self._rules.aggregate and self._chains.is_head(name)):
            return []
        replica, gathered, sends = self._chains.replica(name), self._gathered[name], []
        while (closed := replica.state.aggregate(grace_over)) is not None:
            keys = [key for key, push in gathered.items() if push in closed.pushes]
            for key in keys:
                del gathered[key]
            try:
                sends += self._chains.apply(name, closed)
            except RefusedError as problem:
                replica.state.drop(closed)
                return sends + [Send(c, Done(r, str(problem))) for c, r in keys]
            self._waiting[name] |= dict.fromkeys(keys, replica.sequence)
        return sends

    def _pull(self, pull: Pull) -> list[Send]:
        if pull.epoch < self._chains.view.epoch:
            return [Send(pull.client, Moved(self._chains.view))]
        if not (self._chains.replica(pull.range) and self._chains.is_tail(pull.range)):
            return []
        if (answer := self._answer(pull)) is not None:
            return [answer]
        self._pulls[pull.client, pull.request] = pull
        return []

    def _answer(self, pull: Pull) -> Send | None:
        """The answer to a pull; None if it has to wait."""
        state = self._chains.replica(pull.range).state
        slowest = min(state.clocks.values(), default=-1)
        version = state.version if pull.version < 0 else pull.version

        def answer(values, refused=""):
            request = pull.request
            found = Values(request, pull.range, version, slowest, values, refused)
            return Send(pull.client, found)

        if pull.worker:
            if state.has_gone(pull.worker):
                return answer(None, f"worker {pull.worker} has left {pull.range}")
            # The reader's own push, or its join, may still be on its way down.
            if state.clocks.get(pull.worker, -1) < pull.clock:
                return None
            if not state.allows(pull.clock):
                return None
        if version > state.version:
            return None
        values = state.values_at(version)
        if values is None:
            kept = f"{pull.range} is at {state.version} and keeps {len(state.past)}"
            return answer(None, f"version {version} is gone: {kept}")
        if pull.known == version:
            return answer(None)
        if pull.keys is None:
            return answer(values.copy() if self._copies else values)
        keys, size = pull.keys, len(values)
        if len(keys) and not 0 <= keys.min() <= keys.max() < size:
            return answer(None, f"{pull.range}: keys outside 0 to {size - 1}")
        return answer(values[keys])

    def _progress(self, name: str) -> list[Send]:
        """Answers the waiting requests that the new state of a range allows."""
        replica = self._chains.replica(name)
        if replica is None or replica.acked is None:
            return []
        sends, waiting = self._close_rounds(name), self._waiting[name]
        for (client, request), sequence in list(waiting.items()):
            if sequence <= replica.acked:
                del waiting[client, request]
                sends.append(Send(client, Done(request)))
        if self._chains.is_tail(name):
            for key, pull in list(self._pulls.items()):
                if pull.range == name and (answer := self._answer(pull)) is not None:
                    del self._pulls[key]
                    sends.append(answer)
        return sends

    def _adopt(self, view: View) -> list[Send]:
        if not self._chains.adopts(view):
            return []
        sends = []
        if view.epoch > self._chains.view.epoch:
            clients = {client for client, _ in self._pulls}
            self._pulls = {}
            for waiting in (*self._waiting.values(), *self._gathered.values()):
                clients |= {client for client, _ in waiting}
                waiting.clear()
            sends = [Send(client, Moved(view)) for client in sorted(clients)]
        sends += self._chains.adopt(view)
        return sends + [send for name in view.chains for send in self._progress(name)]
