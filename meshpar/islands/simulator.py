"""Deterministic simulator of the store's servers and workers on a bad network.

Messages are late, lost, doubled and out of order, and processes die, all by draws from
one seed: the same seed gives the same trace. Time is simulated, so that an hour of
waiting costs nothing.
"""

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

from meshpar.errors import MeshparError
from meshpar.islands.client import Client
from meshpar.islands.coordinator import Coordinator
from meshpar.islands.key_range import KeyRange
from meshpar.islands.message_bytes import message_bytes
from meshpar.islands.messages import (
    COORDINATOR,
    HOST,
    Close,
    Join,
    Leave,
    Operation,
    QuorumReached,
    Send,
    View,
)
from meshpar.islands.node import Node
from meshpar.islands.range_state import RangeState
from meshpar.islands.rules import Rules

_DRIVER = "driver"


@dataclasses.dataclass(frozen=True)
class Network:
    """Delays and faults of the network; times are in simulated seconds.

    Attributes:
      delay: shortest and longest time that a message travels.
      bandwidth: bytes per second that a message moves at, besides the delay.
      loss: share of the messages that never arrive.
      duplicates: share of the messages that arrive twice.
      retry: time after which a request without an answer is repeated.
      detection: time until the death of a process is noticed.
    """

    delay: tuple[float, float] = (0.001, 0.002)
    bandwidth: float = float("inf")
    loss: float = 0.0
    duplicates: float = 0.0
    retry: float = 1.0
    detection: float = 1.0


class Simulator:
    """Servers, a coordinator and a driver, under simulated events.

    Args:
      ranges: all ranges of the store.
      rules: its rules.
      servers: names of the first servers.
      replicas: servers that hold a range.
      network: how messages travel.
      seed: of all draws.

    Attributes:
      now: simulated seconds.
      events: events that have happened.
      trace: [(time, address, kind of message)] of all messages that arrived.
      bytes: bytes of values that were sent, retries included.
      random: the source of all draws.
    """

    def __init__(
        self,
        ranges: Sequence[KeyRange],
        rules: Rules,
        *,
        servers: Sequence[str] = ("server 0",),
        replicas: int = 1,
        network: Network = Network(),
        seed: int = 0,
    ):
        self.ranges, self._rules, self._network = list(ranges), rules, network
        self.random = random.Random(seed)
        self.now, self.events, self.bytes = 0.0, 0, 0
        self.trace: list[tuple[float, str, str]] = []
        self._heap: list[tuple[float, int, Callable[..., None], tuple]] = []
        self._ties = itertools.count()
        self._nodes: dict[str, Node] = {}
        self._processes: dict[str, Callable[[Any], list[Send]]] = {}
        self._coordinator = Coordinator([r.name for r in self.ranges], replicas)
        self._client = Client(_DRIVER, self._coordinator.view)
        self._processes[_DRIVER] = lambda message: self._client.handle(message)[1]
        for name in servers:
            self._nodes[name] = Node(name, self.ranges, rules)
        self.send(self._coordinator.change(joins=servers))
        self._tick()

    # Events.

    def after(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        """Calls a function after some simulated seconds."""
        event = (self.now + delay, next(self._ties), action, arguments)
        heapq.heappush(self._heap, event)

    def send(self, sends: Sequence[Send]) -> None:
        """Puts messages on the network."""
        network, draw = self._network, self.random.random
        for to, message in sends:
            if to in (HOST, COORDINATOR):
                self.after(0.0, self._deliver, to, message)
                continue
            num_bytes = message_bytes(message)
            for _ in range(1 + (draw() < network.duplicates)):
                self.bytes += num_bytes
                if draw() < network.loss:
                    continue
                delay = self.random.uniform(*network.delay)
                delay += num_bytes / network.bandwidth
                self.after(delay, self._deliver, to, message)

    def step(self) -> None:
        """Lets the next event happen."""
        self.now, _, action, arguments = heapq.heappop(self._heap)
        self.events += 1
        action(*arguments)

    def run(self, done: Callable[[], bool], most_events: int = 1_000_000) -> None:
        """Runs events until `done`.

        Raises:
          MeshparError: it is not done after `most_events`; something hangs.
        """
        while not done():
            if self.events >= most_events:
                raise MeshparError(
                    f"not done after {most_events} events, at {self.now:.1f} s"
                )
            self.step()

    # Processes.

    def add_process(self, name: str, handle: Callable[[Any], list[Send]]) -> None:
        """A process that gets the messages to `name`; it returns those to send."""
        self._processes[name] = handle

    def kill_process(self, name: str) -> None:
        """A worker dies; after the detection time it leaves all ranges."""
        if self._processes.pop(name, None):
            self.after(self._network.detection, self._remove_worker, name)

    def add_server(self, name: str) -> None:
        """A server joins."""
        self._nodes[name] = Node(name, self.ranges, self._rules)
        self.send(self._coordinator.change(joins=[name]))

    def retire_server(self, name: str) -> None:
        """A server gives up its ranges, and goes when they are in place elsewhere."""
        self.send(self._coordinator.change(leaves=[name]))

    def kill_server(self, name: str) -> None:
        """A server dies with all that it holds; it is noticed later."""
        if self._nodes.pop(name, None):
            self.after(self._network.detection, self._remove_server, name)

    @property
    def settled(self) -> bool:
        """Whether all ranges are in place, and the driver has its answers."""
        return self._coordinator.settled and not self._client.waits

    @property
    def view(self) -> View:
        """The newest view of the membership."""
        return self._coordinator.view

    @property
    def servers(self) -> list[str]:
        """Names of the servers that hold ranges."""
        return self._coordinator.servers

    def states(self, name: str) -> list[RangeState]:
        """The states of a range down its chain, where servers live and hold it."""
        chain = self.view.chains.get(name, ())
        nodes = (self._nodes.get(server) for server in chain)
        states = (node.state(name) for node in nodes if node)
        return [state for state in states if state is not None]

    def start(self, workers: Sequence[str]) -> None:
        """Lets workers join at clock 0, before any of them begins."""
        for key_range in self.ranges:
            for worker in workers:
                self.operate(Join(key_range.name, worker, 0))
        self.run(lambda: self.settled)

    def operate(self, operation: Operation) -> None:
        """The driver sends an operation, and repeats it until it is answered."""
        self.send(self._client.operate(operation))

    def _deliver(self, to: str, message: Any) -> None:
        self.trace.append((self.now, to, type(message).__name__))
        if to == HOST:
            self.after(self._rules.grace, self._close, message)
        elif to == COORDINATOR:
            self.send(self._coordinator.handle(message))
        elif (node := self._nodes.get(to)) is not None:
            self.send(node.handle(message))
        elif (handle := self._processes.get(to)) is not None:
            self.send(handle(message))

    def _tick(self) -> None:
        """Lets the coordinator and the driver repeat unanswered messages."""
        self.send(self._coordinator.tick())
        self.send(self._client.retry())
        self.after(self._network.retry, self._tick)

    def _close(self, quorum: QuorumReached) -> None:
        self.operate(Close(quorum.range, quorum.round))

    def _remove_worker(self, name: str) -> None:
        for key_range in self.ranges:
            self.operate(Leave(key_range.name, name))

    def _remove_server(self, name: str) -> None:
        self.send(self._coordinator.change(dead=[name]))
