"""Training by DBPG: workers that take turns at random against a store.

Everything runs in this process. Workers run ahead of each other as far as the delay
allows, in an order that the seed alone decides, so a training can be repeated.
"""

import collections
import dataclasses
from collections.abc import Callable

import numpy as np
import scipy.sparse as sp

from meshpar.errors import MeshparError
from meshpar.islands.consistency import BSP
from meshpar.islands.key_range import KeyRange, Slice, split
from meshpar.islands.messages import Payload
from meshpar.islands.store import Store
from meshpar.methods.dbpg.packet import Memory, Packet
from meshpar.methods.dbpg.proximal import objective, proximal_update
from meshpar.methods.dbpg.worker import Filters, Settings, Worker, make_filters

_ENCODING = "packet"


@dataclasses.dataclass(frozen=True)
class Pass:
    """The state after a pass that all workers have finished.

    Attributes:
      number: from 1.
      objective: sum of the losses, plus the penalty.
      nonzeros: weights that are not zero.
      pushed: share of the keys that were pushed in this pass.
      sent: bytes in both directions so far.
    """

    number: int
    objective: float
    nonzeros: int
    pushed: float
    sent: int


@dataclasses.dataclass(frozen=True)
class SavedBytes:
    """Bytes that one filter saved, in one direction or in both.

    Attributes:
      direction: "push", "answer" or "both".
      name: of the filter.
      saved: bytes.
    """

    direction: str
    name: str
    saved: int


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a training.

    Attributes:
      weights: float32 [features].
      passes: the state after each pass.
      filters: what each filter saved.
      sent: bytes of all packets.
    """

    weights: np.ndarray
    passes: list[Pass]
    filters: list[SavedBytes]
    sent: int


class _Client:
    """A worker, its place in the sequence of tasks, and the answers that it awaits."""

    def __init__(self, worker: Worker, settings: Settings):
        self.worker, self._settings = worker, settings
        self.task = 0
        self.clocks = [0] * settings.blocks
        self.awaited: collections.deque[tuple[int, Packet]] = collections.deque()
        self._order: list[int] = []

    @property
    def block(self) -> int:
        """The block of the next task."""
        number, place = divmod(self.task, self._settings.blocks)
        if place == 0:
            self._order = self._settings.order(number)
        return self._order[place]

    @property
    def done(self) -> bool:
        """Whether all tasks are done and answered."""
        return self.at_end and not self.awaited

    @property
    def at_end(self) -> bool:
        """Whether all tasks are done."""
        return self.task == self._settings.passes * self._settings.blocks

    @property
    def must_wait(self) -> bool:
        """Whether an answer has to come before the next task."""
        if self.at_end or len(self.awaited) > self._settings.delay:
            return True
        return any(block == self.block for block, _ in self.awaited)


class Training:
    """The store, the workers and the links between them.

    Args:
      rows: float [rows, features].
      labels: 1 or -1, [rows].
      settings: of DBPG.
      num_workers: workers, which share the rows evenly.
      num_servers: servers, which share the blocks.
      replicas: servers that hold each block.

    Raises:
      MeshparError: fewer rows than workers, or fewer features than blocks.
    """

    def __init__(
        self,
        rows: sp.csr_array,
        labels: np.ndarray,
        settings: Settings,
        num_workers: int,
        num_servers: int,
        replicas: int = 1,
    ):
        num_rows, num_features = rows.shape
        if num_rows < num_workers:
            raise MeshparError(
                f"{num_workers} workers for {num_rows} rows: use at most one worker "
                "per row"
            )
        self._rows, self._labels, self._settings = rows, labels, settings
        self._blocks: list[Slice] = split("block", num_features, settings.blocks)
        sizes = [block.stop - block.start for block in self._blocks]
        self.filters: Filters = make_filters(settings, max(sizes))
        update = proximal_update(
            settings.l1,
            num_workers,
            settings.damping,
            settings.kkt_ratio if settings.kkt_filter else None,
        )
        self.store = Store(
            [KeyRange(b.range.name, 2 * b.range.size) for b in self._blocks],
            BSP(),
            update,
            servers=num_servers,
            replicas=replicas,
            decoders={_ENCODING: self._decode},
        )
        self._clients = []
        self._counts = np.zeros((settings.passes, 2), int)
        for rank in range(num_workers):
            cuts = (num_rows * i // num_workers for i in (rank, rank + 1))
            part = slice(*cuts)
            name = f"worker {rank}"
            worker = Worker(
                name,
                rows[part],
                labels[part],
                self._blocks,
                self.filters,
                settings.delay,
            )
            self.store.join(name)
            self._clients.append(_Client(worker, settings))

    def _decode(
        self, packet: Packet, size: int, memory: Memory
    ) -> tuple[np.ndarray, np.ndarray]:
        """A pushed packet as keys and numbers: all gradients, then all curvatures."""
        packet = self.filters.pushes.decode(packet, memory)
        keys = packet.keys.astype(np.int64)
        return np.concatenate([keys, keys + size // 2]), packet.values.reshape(-1)

    def weights(self) -> np.ndarray:
        """The weights in the store, float32 [features]."""
        parts = [
            self.store.state(block.range.name).values[: block.range.size]
            for block in self._blocks
        ]
        return np.concatenate(parts)

    def run(self, say: Callable[[Pass], None] = lambda done: None) -> Result:
        """Trains to the end.

        Args:
          say: called with each pass that all workers have finished.
        """
        rng = np.random.default_rng((self._settings.seed, 1))
        passes: list[Pass] = []
        while not all(client.done for client in self._clients):
            self._turn(self._clients[rng.integers(len(self._clients))])
            if self._passes_done() > len(passes):
                pushed, own = self._counts[len(passes)]
                passes.append(
                    self._measure(len(passes) + 1, float(pushed / max(1, own)))
                )
                say(passes[-1])
        return Result(self.weights(), passes, self._saved(), self._sent())

    def _turn(self, client: _Client) -> None:
        """Lets a worker push its next task, or take an answer if there is one."""
        if client.done:
            return
        if client.must_wait:
            self._take_answer(client)
            return
        task, block = client.task, client.block
        number = task // self._settings.blocks
        full = number % self._settings.full_every == 0
        packet = client.worker.push(task, block, full)
        self._counts[number] += len(packet.keys), client.worker.num_keys(block)
        self._push(client, block, packet)
        client.awaited.append((block, packet))
        client.clocks[block] += 1
        client.task += 1

    def _push(self, client: _Client, block: int, packet: Packet) -> None:
        name, link = self._blocks[block].range.name, self.filters.pushes

        def push() -> None:
            payload = Payload(link.encode(packet), _ENCODING)
            self.store.push(name, client.worker.name, client.clocks[block], payload)

        try:
            push()
        except MeshparError:
            # A server that does not know the hash of the keys gets the keys.
            if not link.forget(packet.channel):
                raise
            push()

    def _take_answer(self, client: _Client) -> None:
        """Pulls the result of the oldest task, if all workers have pushed it."""
        block, packet = client.awaited[0]
        part, name = self._blocks[block].range, client.worker.name
        keys = packet.keys.astype(np.int64)
        both = np.concatenate([keys, keys + part.size])
        values = self.store.pull(part.name, name, client.clocks[block], both)
        if values is None:
            return
        client.awaited.popleft()
        weights, far = values.values.reshape(2, len(keys))
        answer = Packet(
            packet.channel,
            packet.task,
            packet.keys,
            np.where(far > 0, np.float32("nan"), weights)[None],
            implied=True,
        )
        client.worker.receive(block, self.filters.answers.encode(answer))

    def _passes_done(self) -> int:
        """Passes that all workers have finished."""
        tasks = (client.task - len(client.awaited) for client in self._clients)
        return min(tasks) // self._settings.blocks

    def _measure(self, number: int, pushed: float) -> Pass:
        weights = self.weights()
        margins = self._labels * (self._rows @ weights)
        value = objective(margins, weights, self._settings.l1)
        nonzeros = int(np.count_nonzero(weights))
        return Pass(number, value, nonzeros, pushed, self._sent())

    def _sent(self) -> int:
        return self.filters.pushes.sent + self.filters.answers.sent

    def _saved(self) -> list[SavedBytes]:
        kkt = self.filters.kkt
        saved = [SavedBytes("both", kkt.name, kkt.saved)] if kkt else []
        for direction in ("pushes", "answers"):
            for part in getattr(self.filters, direction).filters:
                saved.append(SavedBytes(direction, part.name, part.saved))
        return saved
