"""Servers and coordinator of the store as Ray actors.

A server is an async actor around a `Node`. It sends messages to the other servers and
to the coordinator without waiting for them. Senders repeat a question until it is
answered, so a lost message only costs time. A server that dies is replaced by a new
one, which copies its ranges from their replicas.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import jax
import ray

from meshpar.islands.coordinator import Coordinator, RangeLostError
from meshpar.islands.key_range import KeyRange
from meshpar.islands.messages import (
    COORDINATOR,
    HOST,
    Close,
    Moved,
    Request,
    Values,
    View,
)
from meshpar.islands.node import Node
from meshpar.islands.rules import Rules
from meshpar.mesh.platform import CPU

_TICK_S = 0.5
"""Seconds after which the coordinator repeats what has no answer."""

_SHARED_BYTES = 1 << 20
"""Bytes from which on values go through Ray's shared memory."""

_AGAIN_S = 0.05
"""Seconds after which a server looks again at a request that it ignored."""

_PING_S = 5.0
"""Seconds in which a server that somebody reported as dead has to answer."""


class Server:
    """A server of the store; runs as an async actor.

    Args:
      name: unique among all servers there ever are.
      ranges: all ranges of the store.
      make_rules: makes the store's rules in this process.
    """

    def __init__(
        self, name: str, ranges: list[KeyRange], make_rules: Callable[[], Rules]
    ):
        # A server must not take an accelerator that an island needs.
        jax.config.update("jax_platforms", CPU.name)
        self._rules = make_rules()
        self._node = Node(name, ranges, self._rules, copies=False)
        self._shared: dict[str, tuple[int, Any]] = {}
        self._sizes = {key_range.name: key_range.size for key_range in ranges}
        self._answers: dict[tuple[str, int], asyncio.Future] = {}
        self._peers: dict[str, Any] = {}
        self._closes = 0

    async def meet(self, peers: dict[str, Any]) -> None:
        """Learns the handles of all servers and of the coordinator."""
        self._peers = peers

    async def ping(self) -> int:
        """The id of this process."""
        import os

        return os.getpid()

    async def deliver(self, message: Any) -> None:
        """Handles a message of another server, or of the coordinator."""
        self._handle(message)

    async def ask(self, message: Any) -> Any:
        """Handles a request of a client; returns its answer."""
        key = message.client, message.request
        future = asyncio.get_running_loop().create_future()
        if (older := self._answers.get(key)) is not None and not older.done():
            older.set_result(None)
        self._answers[key] = future
        self._handle(message)
        while not future.done() and not self._node.waits(message):
            # It was ignored: the range is being moved, or an earlier push is missing.
            await asyncio.sleep(_AGAIN_S)
            if not future.done():
                self._handle(message)
        return await future

    async def snapshot(self, name: str) -> dict | None:
        """The state of a range, if it is in place here."""
        state = self._node.state(name)
        return state.snapshot() if state else None

    async def restore(self, name: str, snapshot: dict) -> None:
        """Puts the state of a snapshot into the copy of a range."""
        self._node.restore(name, snapshot)
        self._shared.pop(name, None)

    def _handle(self, message: Any) -> None:
        sends = self._node.handle(message)
        # Memory that is freed before the next copy is used again, and need not be
        # mapped into this process once more: that costs twice as much as the copy.
        for name, (version, _) in list(self._shared.items()):
            if (state := self._node.state(name)) is None or state.version != version:
                del self._shared[name]
        self._route(sends)

    def _route(self, sends: list) -> None:
        for to, message in sends:
            if to == HOST:
                loop = asyncio.get_running_loop()
                loop.call_later(self._rules.grace, self._close, message)
            elif to in self._peers:
                self._peers[to].deliver.remote(message)
            elif isinstance(message, Moved):
                for key in [key for key in self._answers if key[0] == to]:
                    self._answer(key, message)
            elif to != COORDINATOR:
                if isinstance(message, Values) and message.values is not None:
                    message = self._copied(message)
                self._answer((to, message.request), message)

    def _answer(self, key: tuple[str, int], message: Any) -> None:
        future = self._answers.pop(key, None)
        if future is not None and not future.done():
            future.set_result(message)

    def _copied(self, found: Values) -> Values:
        """The answer with a copy of its values, which readers of a version share."""
        if found.values.nbytes < _SHARED_BYTES:
            return found._replace(values=found.values.copy())
        whole = len(found.values) == self._sizes[found.range]
        version, reference = self._shared.get(found.range, (-1, None))
        if not whole or version != found.version:
            reference = ray.put(found.values)
            if whole:
                self._shared[found.range] = found.version, reference
        return found._replace(values=reference)

    def _close(self, quorum: Any) -> None:
        self._closes += 1
        close = Close(quorum.range, quorum.round)
        epoch = 1 << 62  # A head that is one no more ignores it.
        self._handle(Request("grace", self._closes, epoch, close))


class Coordination:
    """The coordinator of the store; runs as an async actor, and starts the servers.

    Args:
      ranges: all ranges of the store.
      make_rules: makes the store's rules in a server's process.
      servers: number of servers; one that dies is replaced.
      replicas: servers that hold a range.
      options: of the actors.
    """

    def __init__(
        self,
        ranges: list[KeyRange],
        make_rules: Callable[[], Rules],
        servers: int,
        replicas: int,
        options: dict[str, Any],
    ):
        self._ranges, self._make_rules, self._options = ranges, make_rules, options
        self._coordinator = Coordinator([r.name for r in ranges], replicas)
        self._handles: dict[str, Any] = {}
        self._count, self._wanted = 0, servers
        self._ticking = self._replacing = None
        self._lost: RangeLostError | None = None

    async def start(self, me: Any) -> None:
        """Starts the servers.

        Args:
          me: the handle of this actor.
        """
        self._handles[COORDINATOR] = me
        await self._begin([self._new() for _ in range(self._wanted)])
        self._ticking = asyncio.create_task(self._tick())
        while not self._coordinator.settled:
            await asyncio.sleep(0.01)

    async def deliver(self, message: Any) -> None:
        """Handles a message of a server."""
        try:
            self._route(self._coordinator.handle(message))
        except RangeLostError as error:
            self._lost = error  # `view` raises it in the clients.

    async def view(self) -> tuple[View, dict[str, Any]]:
        """The newest view, and the handles of its servers.

        Raises:
          RangeLostError: all replicas of a range are gone.
        """
        if self._lost is not None:
            raise self._lost
        return self._coordinator.view, dict(self._handles)

    async def settled(self) -> bool:
        """Whether all ranges are in place."""
        return self._coordinator.settled

    async def pids(self) -> dict[str, int]:
        """{server: id of its process}."""
        names = self._coordinator.servers
        pids = [self._handles[name].ping.remote() for name in names]
        return dict(zip(names, await asyncio.gather(*pids), strict=True))

    async def report(self, name: str) -> None:
        """Somebody had no answer from a server: replaces it, if it is dead."""
        handle = self._handles.get(name)
        if handle is None:
            return
        try:
            await asyncio.wait_for(handle.ping.remote(), _PING_S)
        except (ray.exceptions.RayActorError, TimeoutError):
            if self._handles.pop(name, None) is not None:
                ray.kill(handle)
                await self._begin_without(name)
                self._replacing = asyncio.create_task(self._replace())

    async def _begin_without(self, name: str) -> None:
        """Begins a view without a dead server.

        Raises:
          RangeLostError: it was the last one.
        """
        try:
            await self._begin([], [name])
        except RangeLostError as error:
            self._lost = error  # As in `deliver`.
            raise

    async def _replace(self) -> None:
        """Starts a server, which joins as soon as its process is there."""
        name = self._new()
        await self._handles[name].ping.remote()
        await self._begin([name])

    async def resize(self, servers: int) -> None:
        """Servers join or leave, until there are so many; waits for the ranges."""
        names = self._coordinator.servers
        joins = [self._new() for _ in range(servers - len(names))]
        leaves = names[servers:]
        self._wanted = servers
        await self._begin(joins, (), leaves)
        while not self._coordinator.settled:
            await asyncio.sleep(0.01)
        for name in leaves:
            self._handles.pop(name, None)

    def _new(self) -> str:
        """Starts the process of a new server."""
        name, self._count = f"server {self._count}", self._count + 1
        actor = ray.remote(Server).options(**self._options)
        self._handles[name] = actor.remote(name, self._ranges, self._make_rules)
        return name

    async def _begin(self, joins: list[str], dead=(), leaves=()) -> None:
        for name, handle in self._handles.items():
            if name != COORDINATOR:
                handle.meet.remote(self._handles)
        self._route(self._coordinator.change(joins, leaves, dead))

    def _route(self, sends: list) -> None:
        for to, message in sends:
            if to in self._handles:
                self._handles[to].deliver.remote(message)
            else:
                raise AssertionError((to, message))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._route(
                send for send in self._coordinator.tick() if send.to in self._handles
            )
