"""The store of a parameter server, in one process and without waiting.

    from meshpar import islands
    parts = islands.split("weights", 1000, parts=4)
    store = islands.Store([part.range for part in parts], islands.SSP(2),
                          optax.adagrad(0.1), servers=2, replicas=2)
    clock = store.join("worker 0")
    for part in parts:
        read = store.pull(part.range.name, "worker 0", clock)   # None: ask again later
        store.push(part.range.name, "worker 0", clock, gradient[part.start:part.stop])

It runs the servers (`Node`) and the coordinator of this store and delivers their
messages at once. The hosts in this package run the same machines in threads, in Ray
actors, or under a simulated network.
"""

import collections
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from meshpar.errors import MeshparError
from meshpar.islands.consistency import Consistency
from meshpar.islands.key_range import KeyRange
from meshpar.islands.loopback import Loopback
from meshpar.islands.messages import (
    Close,
    Join,
    Leave,
    Operation,
    Payload,
    Push,
    QuorumReached,
    SetValues,
    Values,
)
from meshpar.islands.optax_update import as_update
from meshpar.islands.range_state import RangeState
from meshpar.islands.rules import Decoder, Rules


def check_settings(
    ranges: Sequence[KeyRange],
    replicas: int,
    quorum: int | None,
    grace: float,
    history: int = 0,
) -> None:
    """Raises MeshparError for settings that no store can have."""
    names = [key_range.name for key_range in ranges]
    if not names or len(set(names)) < len(names):
        raise MeshparError(f"ranges={names}: use at least one, with unique names")
    for name, value in (("replicas", replicas), ("quorum", quorum)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise MeshparError(f"{name}={value!r}: use a whole number >= 1")
    if not isinstance(history, int) or history < 0:
        raise MeshparError(f"history={history!r}: use a whole number >= 0")
    if grace < 0:
        raise MeshparError(f"grace={grace}: use seconds >= 0")


def chosen_version(version: int | None, reached: int) -> int:
    """The version to read, by default the newest that all ranges have reached.

    Raises:
      MeshparError: a version that is not there yet.
    """
    version = reached if version is None else version
    if not (isinstance(version, Integral) and 0 <= version <= reached):
        raise MeshparError(
            f"version={version}: use 0 to {reached}, which all ranges have reached"
        )
    return version


class Store:
    """Key ranges on several servers, each with a server-side update and vector clocks.

    A worker joins, then pulls and pushes. Every push to a range advances the worker's
    clock there by one; (range, worker, clock) is the id of a push, and repeating it
    changes nothing. A push that is answered is on all replicas of its range.

    Args:
      ranges: the key ranges.
      consistency: `BSP()`, `SSP(s)`, `ASP()` or `BoundedDelay(tau)`.
      update: what a push does to the values: an elementwise optax optimizer (pushes are
        gradients), or any function (values, state, `Contribution`) that changes values
        and state in place; see `meshpar.islands.updates`. A dict {range name: update}
        gives every range its own.
      servers: number of servers, or their names.
      replicas: servers that hold each range.
      quorum: average the pushes in rounds, and close a round with this many workers.
      grace: seconds that a round stays open for other workers once it has its quorum.
        The store has no clock: its host measures them (`take_quorums`, `close`).
      decoders: {encoding: decoder} of payloads that are not plain arrays.
      history: older versions of its values that each range keeps, for `pull_version`.
      aggregate: in rounds, whether the average of a round travels to the replicas in
        place of its pushes. A push is then answered with its round, when the worker's
        clock advances; until then it is on one server, and is repeated if that dies.

    Raises:
      MeshparError: settings that no store can have.
    """

    def __init__(
        self,
        ranges: Sequence[KeyRange],
        consistency: Consistency,
        update: Any,
        *,
        servers: int | Sequence[str] = 1,
        replicas: int = 1,
        quorum: int | None = None,
        grace: float = 0.0,
        decoders: Mapping[str, Decoder] | None = None,
        history: int = 0,
        aggregate: bool = False,
    ):
        check_settings(ranges, replicas, quorum, grace, history)
        if isinstance(servers, int):
            servers = [f"server {i}" for i in range(servers)]
        self.ranges = {key_range.name: key_range for key_range in ranges}
        self.rules = Rules(
            consistency,
            as_update(update),
            quorum,
            grace,
            dict(decoders or {}),
            history,
            aggregate,
        )
        self._servers = Loopback(ranges, self.rules, replicas)
        self._servers.change(joins=servers)

    @property
    def servers(self) -> list[str]:
        """Names of the servers."""
        return self._servers.names

    @property
    def chains(self) -> Mapping[str, tuple[str, ...]]:
        """{range: servers that hold it, the head first}."""
        return self._servers.view.chains

    def state(self, name: str) -> RangeState:
        """The state of a range at its tail: values, clocks, round, version."""
        return self._servers.state(self._known(name))

    def clocks(self, name: str) -> dict[str, int]:
        """{worker: pushes that it has made to the range}, of the members."""
        return dict(self.state(name).clocks)

    # Workers.

    def join(self, worker: str, clock: int | None = None) -> int:
        """A worker joins all ranges; returns the clock at which it begins.

        Args:
          worker: a name that no worker had before.
          clock: the first clock; by default the largest of the ranges' slowest clocks,
            so that nobody waits for pushes that the worker never made.
        """
        if clock is None:
            states = map(self.state, self.ranges)
            clock = max(
                min(state.clocks.values(), default=state.round) for state in states
            )
        for name in self.ranges:
            if self.state(name).has_gone(worker):
                raise MeshparError(f"worker {worker} was here before: use a new name")
            self._operate(Join(name, worker, clock))
        return clock

    def leave(self, worker: str) -> None:
        """A worker leaves all ranges, by itself or because it is dead."""
        for name in self.ranges:
            self._operate(Leave(name, worker))

    def ready(self, name: str, worker: str, clock: int) -> bool:
        """Whether a pull would be answered now."""
        state = self.state(name)
        return state.clocks.get(worker, -1) >= clock and state.allows(clock)

    def pull(
        self,
        name: str,
        worker: str = "",
        clock: int = 0,
        keys: np.ndarray | None = None,
        known: int = -1,
    ) -> Values | None:
        """Reads a range; None if the consistency model wants the reader to wait.

        Args:
          name: the range.
          worker: the reader; "" reads at once, without a clock.
          clock: pushes that the reader has made to the range.
          keys: integer keys; None for the whole range.
          known: a version that the reader has; if it is the newest, `values` is None.

        Raises:
          MeshparError: an unknown range, a worker that has left, or bad keys.
        """
        state = self.state(name)
        if (
            worker
            and not state.has_gone(worker)
            and not self.ready(name, worker, clock)
        ):
            return None
        answer = self._servers.pull(name, worker, clock, keys, known)
        if answer.refused:
            raise MeshparError(answer.refused)
        return answer

    def pull_version(
        self, version: int | None = None
    ) -> tuple[int, dict[str, np.ndarray]]:
        """Reads all ranges at one version, while others train on.

        In rounds (BSP, or a quorum) a version holds the same rounds in every range, so
        that a group that only infers never sees half of a round. Otherwise versions
        count the pushes to each range.

        Args:
          version: of all ranges; by default the newest that all of them have reached.

        Returns:
          (version, {range: values}).

        Raises:
          MeshparError: a version that a range has not reached, or does not keep.
        """
        reached = min(self.state(name).version for name in self.ranges)
        version, found = chosen_version(version, reached), {}
        for name in self.ranges:
            answer = self._servers.pull(name, "", 0, None, -1, version)
            if answer.refused:
                raise MeshparError(f"{answer.refused}; use a larger history")
            found[name] = np.array(answer.values)
        return version, found

    def push(self, name: str, worker: str, clock: int, payload: Any) -> None:
        """Pushes an update to a range, and advances the worker's clock there.

        Args:
          name: the range.
          worker: a member.
          clock: pushes that the worker has made to the range before.
          payload: an array [size], a pair (sorted keys, values), a `Payload`, or None
            to advance the clock alone.

        Raises:
          MeshparError: an unknown range, no member, a clock that is too early, or
            values that do not fit.
        """
        self._known(name)
        if isinstance(payload, tuple):
            payload = Payload(payload)
        elif payload is not None and not isinstance(payload, Payload):
            payload = Payload((None, payload))
        self._operate(Push(name, worker, clock, payload))

    def set_values(self, name: str, values: np.ndarray, label: str = "start") -> None:
        """Sets the values of a range; once per label."""
        self._known(name)
        self._operate(SetValues(name, label, values))

    # Rounds.

    def take_quorums(self) -> list[QuorumReached]:
        """Rounds with a new quorum, which the host closes after the grace window."""
        return self._servers.take_quorums()

    def close(self, quorum: QuorumReached) -> None:
        """Ends the grace window of a round."""
        self._operate(Close(quorum.range, quorum.round))

    # Servers.

    def add_server(self, server: str) -> None:
        """A server joins: some ranges move to it. Its name must be new."""
        self._servers.change(joins=[server])

    def remove_server(self, server: str, dead: bool = False) -> None:
        """Removes a server; if `dead`, its ranges are taken from the replicas.

        Raises:
          MeshparError: no such server, or no other one.
          RangeLostError: it held the last replica of a range, and is dead.
        """
        if server not in self.servers or self.servers == [server]:
            raise MeshparError(f"server {server} cannot leave {self.servers}")
        self._servers.change(**{"dead" if dead else "leaves": [server]})

    # Checkpoints.

    def snapshot(self) -> dict[str, np.ndarray]:
        """All values, optimizer states, clocks and open rounds, as a flat dict."""
        return {
            f"{name}|{key}": array
            for name in self.ranges
            for key, array in self.state(name).snapshot().items()
        }

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        """Takes the state of a snapshot of the same ranges, on any servers.

        Raises:
          MeshparError: a range that the snapshot does not hold.
        """
        parts: dict[str, dict[str, np.ndarray]] = collections.defaultdict(dict)
        for key, array in snapshot.items():
            name, _, rest = key.partition("|")
            parts[name][rest] = array
        if set(parts) != set(self.ranges):
            raise MeshparError(
                f"the snapshot holds ranges {sorted(parts)}, the store "
                f"{sorted(self.ranges)}"
            )
        for name, part in parts.items():
            self._servers.restore(name, part)

    def _known(self, name: str) -> str:
        if name not in self.ranges:
            raise MeshparError(f"range {name!r}: the store has {sorted(self.ranges)}")
        return name

    def _operate(self, operation: Operation) -> None:
        answer = self._servers.operate(operation)
        if answer is None:
            clock = self.clocks(operation.range).get(operation.worker)
            raise MeshparError(
                f"worker {operation.worker} pushes clock {operation.clock} to "
                f"{operation.range}, and is at clock {clock}"
            )
        if answer.refused:
            raise MeshparError(answer.refused)
