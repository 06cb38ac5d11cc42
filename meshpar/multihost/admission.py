"""Process 0 lets in the processes of its run, and nobody else.

A stranger cannot end the wait, prolong it or take the place of a process: every
connection has a time limit, a longest message and errors of its own, and counts only
after it has proved that it knows the token of the run.
"""

import contextlib
import dataclasses
import selectors
import socket
import time
from typing import Any

from meshpar.multihost import address
from meshpar.multihost import token as tokens
from meshpar.multihost.messages import Hello, Message
from meshpar.multihost.process import ProcessInfo

GREETING = "meshpar"
"""First word that process 0 sends; its challenge follows."""

PROOF_S = 5.0
"""How long a connection may take to prove that it belongs to the run, in seconds."""

MAX_STRANGERS = 256
"""Connections without a proof that are open at once; then the oldest is closed."""

MAX_HOSTS = 16
"""Hosts whose refused connections are counted each for itself."""

OTHERS = "other hosts"

POLL_S = 0.2
"""How long one look after the connections takes at most, in seconds."""


@dataclasses.dataclass(eq=False)
class _Visitor:
    """A connection to process 0.

    Attributes:
      connection: its socket, which never blocks.
      host: the address that it comes from.
      challenge: what its proof has to answer.
      expires: when it has to have proved itself, by `time.monotonic`.
      received: its bytes so far.
      reply_challenge: what the proof of process 0's reply has to answer; "" before
        the connection has proved itself.
    """

    connection: socket.socket
    host: str
    challenge: str
    expires: float
    received: bytes = b""
    reply_challenge: str = ""


class Admission:
    """The connections to process 0.

    Attributes:
      alive: {rank: connection} of the processes that have arrived and still run; a new
        dict with every change.
      problem: why the processes do not fit together; "" while they do.
      refused: {host: number of its connections that did not prove to belong}, and
        those of all hosts beyond `MAX_HOSTS` together.
    """

    def __init__(
        self,
        process: ProcessInfo,
        token: bytes,
        servers: list[socket.socket],
        newest_counts: bool = False,
    ):
        """Takes over the listening sockets.

        Args:
          process: process 0.
          token: the token of the run.
          servers: listening sockets, which `close` closes.
          newest_counts: whether a process takes the place of an earlier one of its
            rank, whose machine may have been cut off; otherwise two are a problem.
        """
        self._process, self._token = process, token
        self._newest_counts = newest_counts
        self._selector = selectors.DefaultSelector()
        self._servers = servers
        for server in servers:
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ)
        self._strangers: list[_Visitor] = []  # Oldest first.
        self._let_in: list[_Visitor] = []
        self.alive: dict[int, _Visitor] = {}
        self.problem = ""
        self.refused: dict[str, int] = {}

    def wait(self, deadline: float) -> list[int]:
        """Waits until all processes have arrived or there is a problem.

        Args:
          deadline: when to stop waiting, by `time.monotonic`.

        Returns:
          The ranks that have not arrived at the deadline.
        """
        expected = set(range(1, self._process.num_processes))
        while not self.problem:
            missing = sorted(expected - {*self.alive})
            left = deadline - time.monotonic()
            if left <= 0 or not missing:
                return missing
            self.poll(min(left, POLL_S))
        return []

    def poll(self, seconds: float) -> None:
        """Looks after the connections, for at most so many seconds."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept(key.fileobj)
            else:
                self._read(key.data)
        now = time.monotonic()
        for visitor in [v for v in self._strangers if v.expires < now]:
            self._refuse(visitor)

    def reply(self, message: Message) -> None:
        """Tells every process that has arrived how the start went."""
        for visitor in self._let_in:
            self._send(visitor, message)

    def admit(self, rank: int, message: Message) -> None:
        """Sends a process to the run, which it joins elsewhere."""
        self._send(self.alive[rank], message)
        self._leave(self.alive[rank])

    def close(self) -> None:
        """Closes all sockets."""
        self._selector.close()
        visitors = [*self._strangers, *self._let_in]
        for opened in [*self._servers, *(v.connection for v in visitors)]:
            opened.close()

    def _send(self, visitor: _Visitor, message: Message) -> None:
        line = tokens.seal(self._token, visitor.reply_challenge, message)
        with contextlib.suppress(OSError):
            visitor.connection.sendall(line)

    def _accept(self, server: Any) -> None:
        try:
            connection, (host, *_) = server.accept()
        except OSError:
            return  # It has gone already.
        connection.setblocking(False)
        challenge = tokens.make_challenge()
        expires = time.monotonic() + PROOF_S
        visitor = _Visitor(connection, host, challenge, expires)
        if len(self._strangers) == MAX_STRANGERS:
            self._refuse(self._strangers[0])
        self._strangers.append(visitor)
        self._selector.register(connection, selectors.EVENT_READ, visitor)
        try:
            address.notice_loss(connection)
            connection.sendall(f"{GREETING} {challenge}\n".encode())
        except OSError:
            self._refuse(visitor)

    def _read(self, visitor: _Visitor) -> None:
        """Reads what a connection sent; after its proof it may only stay open."""
        try:
            read = visitor.connection.recv(tokens.MAX_LINE)
        except BlockingIOError:
            return
        except OSError:
            read = b""
        if visitor.reply_challenge:
            self._leave(visitor)
            return
        visitor.received += read
        if not read or len(visitor.received) > tokens.MAX_LINE:
            self._refuse(visitor)
        elif b"\n" in visitor.received:
            content = tokens.unseal(self._token, visitor.challenge, visitor.received)
            hello = None if content is None else Hello.of(content)
            if hello is None or not hello.challenge:
                self._refuse(visitor)
            else:
                self._let_into_run(visitor, hello)

    def _let_into_run(self, visitor: _Visitor, hello: Hello) -> None:
        """Notes a process of the run, and whether it fits to the others."""
        self._strangers.remove(visitor)
        self._let_in.append(visitor)
        visitor.reply_challenge = hello.challenge
        rank, num, told = hello.process, hello.num, self.problem
        expected = self._process.num_processes
        if self._newest_counts and rank in self.alive:
            self._leave(self.alive[rank])
        if num != expected:
            self.problem = (
                f"process {rank} expects {num} processes, process 0 {expected}"
            )
        elif rank in self.alive or rank == 0:
            self.problem = f"two processes have rank {rank}"
        elif not 0 < rank < expected:
            self.problem = f"rank {rank} is not one of 0 to {expected - 1}"
        else:
            self.alive = self.alive | {rank: visitor}
            return
        if told:  # The door outlives a problem, and holds one connection of its kind.
            self._leave(visitor)

    def _leave(self, visitor: _Visitor) -> None:
        """Forgets a process that has died; it may come again."""
        if visitor in self._let_in:  # A later one may have taken its place.
            self._drop(visitor, self._let_in)
        self.alive = {rank: v for rank, v in self.alive.items() if v is not visitor}

    def _refuse(self, visitor: _Visitor) -> None:
        if visitor in self._strangers:
            known = visitor.host in self.refused or len(self.refused) < MAX_HOSTS
            host = visitor.host if known else OTHERS
            self.refused[host] = self.refused.get(host, 0) + 1
            self._drop(visitor, self._strangers)

    def _drop(self, visitor: _Visitor, held: list[_Visitor]) -> None:
        held.remove(visitor)
        self._selector.unregister(visitor.connection)
        visitor.connection.close()
