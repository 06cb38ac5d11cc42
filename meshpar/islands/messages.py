"""Messages between workers, the servers of the store, and its coordinator.

An *operation* changes a range and is replicated along its chain. A *request* carries an
operation or a pull to a server, and is repeated until it is answered: operations have
ids, so a repetition changes nothing. An *epoch* numbers the views of the membership;
servers ignore each other's messages from another epoch.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from meshpar.islands.key_range import Contribution

PLAIN = ""
"""Encoding of a payload that is a pair (keys or None, values)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Payload:
    """The content of a push.

    Attributes:
      data: with the encoding `PLAIN` a pair (sorted integer keys or None, values); else
        whatever the decoder of that name takes.
      encoding: name of a decoder of the store.
      weight: weight of the worker in an average, such as its number of tokens.
      version: `Values.version` of what the worker read; -1 if unknown.
      read: the values that the worker read, for updates that need them; or None.
    """

    data: Any
    encoding: str = PLAIN
    weight: float = 1.0
    version: int = -1
    read: np.ndarray | None = None


# Operations.


class Push(NamedTuple):
    """The push of one worker at one clock; (range, worker, clock) is its id.

    A payload of None only advances the clock, as a worker does that has nothing to say
    about a range.
    """

    range: str
    worker: str
    clock: int
    payload: Payload | None


class Join(NamedTuple):
    """A worker joins a range at a clock. The name of a worker is used only once."""

    range: str
    worker: str
    clock: int


class Leave(NamedTuple):
    """A worker leaves a range: nobody waits for it any more."""

    range: str
    worker: str


class Close(NamedTuple):
    """The grace window of a round is over: it closes if it has its quorum."""

    range: str
    round: int


class SetValues(NamedTuple):
    """Sets the values of a range, before training or from a warm start.

    The id is the pair (range, `name`); a name is used only once.
    """

    range: str
    name: str
    values: np.ndarray


class Aggregate(NamedTuple):
    """The pushes of a round as one operation, which the head of the range makes.

    Attributes:
      pushes: (worker, clock) of all pushes in it, so that no replica takes them again.
      average: what the update gets; None if no push had a payload.
    """

    range: str
    round: int
    pushes: tuple[tuple[str, int], ...]
    average: Contribution | None


Operation = Push | Join | Leave | Close | SetValues | Aggregate


# Requests of clients, and their answers. `client` and `request` name the answer's way.


class Request(NamedTuple):
    """An operation from a client to the head of its range."""

    client: str
    request: int
    epoch: int
    operation: Operation


class Pull(NamedTuple):
    """A read of a range at the reader's clock, sent to the tail of its chain.

    Attributes:
      worker: the reader; "" reads at once, without a clock (evaluation).
      keys: sorted integer keys; None for the whole range.
      known: version that the reader has; the answer to it holds no values.
      version: the version to read, once it is there; -1 for the newest.
    """

    client: str
    request: int
    epoch: int
    range: str
    worker: str
    clock: int
    keys: np.ndarray | None = None
    known: int = -1
    version: int = -1


class AskView(NamedTuple):
    """Client to coordinator: which view is the newest? The answer is `Moved`."""

    client: str


class Done(NamedTuple):
    """The operation is on all replicas of its range, or `refused` says why not."""

    request: int
    refused: str = ""


class Values(NamedTuple):
    """The answer to a pull.

    Attributes:
      version: updates that the range has applied; send it back with the push.
      slowest: the smallest clock of a member, -1 without members.
      values: numbers of the range, or of the keys asked for; None if the reader has
        this version.
      refused: why there are none.
    """

    request: int
    range: str
    version: int
    slowest: int
    values: np.ndarray | None
    refused: str = ""


class Moved(NamedTuple):
    """The view to use from now on."""

    view: "View"


class QuorumReached(NamedTuple):
    """Tells the host to send `Close` for this round after the grace window."""

    range: str
    round: int


# Between servers, and with the coordinator.


@dataclasses.dataclass(frozen=True)
class View:
    """A view: the servers of each range in one epoch.

    Attributes:
      epoch: number of the view.
      chains: {range: servers, the head first}.
      sources: {range: the server whose state counts}; without one the range starts new.
    """

    epoch: int
    chains: Mapping[str, tuple[str, ...]]
    sources: Mapping[str, str]


class Prepare(NamedTuple):
    """Coordinator to server: stop the work of earlier epochs, and say what you hold."""

    epoch: int


class Prepared(NamedTuple):
    """The answer: {range: (epoch of the state, operations in it)}."""

    epoch: int
    server: str
    holds: Mapping[str, tuple[int, int]]


class Adopt(NamedTuple):
    """Coordinator to server: work under this view; repeated until all is in place."""

    view: View


class Synced(NamedTuple):
    """Tail to coordinator: all replicas of the range hold its state."""

    epoch: int
    range: str


class Settled(NamedTuple):
    """Coordinator to server: all ranges are in place, so drop ranges of others."""

    epoch: int


class Install(NamedTuple):
    """Server to its successor in a chain: the whole state of a range."""

    epoch: int
    range: str
    sequence: int
    state: Mapping[str, Any]


class Installed(NamedTuple):
    """The answer, once everything downstream holds the state as well."""

    epoch: int
    range: str
    sequence: int


class Forward(NamedTuple):
    """Server to its successor: the next operation of a range."""

    epoch: int
    range: str
    sequence: int
    operation: Operation


class Acked(NamedTuple):
    """Server to its predecessor: all operations up to this one are downstream."""

    epoch: int
    range: str
    sequence: int


class Send(NamedTuple):
    """A message that the host delivers to a server, a client, or a name below."""

    to: str
    message: Any


COORDINATOR, HOST = "coordinator", "host"
"""Names of the coordinator and of the host, as addresses."""
