"""An island as a Ray actor: a process that trains and talks to the store."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshpar import compat
from meshpar.islands.algorithms import make_island
from meshpar.islands.island_program import compile_island, load, save
from meshpar.islands.key_range import Slice
from meshpar.islands.messages import Payload, Values
from meshpar.islands.mode import Islands
from meshpar.islands.ray_client import RayClient
from meshpar.islands.worker import PUSH, Span, Worker
from meshpar.lowering.train_program import TrainProgram
from meshpar.mesh.mesh import simulate
from meshpar.mesh.platform import CPU


class _Endpoint:
    """A worker's way to the store."""

    def __init__(self, name: str, coordinator: Any):
        self._name, self._client = name, RayClient(name, coordinator)

    def pull(
        self, names: list[str], clock: int, known: Mapping[str, int]
    ) -> list[Values]:
        return self._client.pull(self._name, names, clock, known)

    def push(self, clock: int, payloads: Mapping[str, Payload]) -> None:
        self._client.push(self._name, clock, payloads)


class IslandProcess:
    """An island; runs as an actor with two threads, one of which may wait.

    Call `make`, then `begin`.
    """

    def make(
        self,
        build: Callable[[], TrainProgram],
        mode: Islands,
        start: Sequence[np.ndarray],
        num_devices: int,
        platform: str,
        compiled: str,
    ) -> None:
        """Makes the island, and compiles its step before anybody waits for it.

        Args:
          build: makes the island's program in this process.
          mode: the mode.
          start: leaves of the training state that it starts from.
          num_devices: devices that it needs.
          platform: their platform, as jax calls it.
          compiled: folder of compiled programs, from which a process that takes the
            place of a dead one loads what the first ones compiled.
        """
        if platform == CPU.name:
            jax.config.update("jax_platforms", platform)
        simulate(num_devices)
        path = os.path.join(compiled, "island")
        # What jax read from a cache of its own cannot be written for other processes.
        shares = not compat.compilation_cache_folder()
        if shares and os.path.exists(path):
            program = load(path, jax.devices()[:num_devices])
        else:
            program = compile_island(build(), mode)
            if shares:
                save(program, path)
        make_island(program, mode, start).train(program.zeros())
        self._mode, self._island = mode, make_island(program, mode, start)

    def begin(
        self, name: str, slices: list[Slice], coordinator: Any, clock: int
    ) -> None:
        """Begins as a member of the store.

        Args:
          name: its name in the store.
          slices: the ranges of the store.
          coordinator: handle of the store's coordinator.
          clock: at which it joined.
        """
        endpoint = _Endpoint(name, coordinator)
        self._worker = Worker(name, self._island, self._mode, slices, endpoint, clock)

    def prepare(self) -> None:
        """Waits until the island needs a batch."""
        self._worker.prepare()

    def pulling(self) -> bool:
        """Whether the island reads from the store, or waits until it may."""
        return self._worker.pulling

    def train(self, batch: Any) -> dict[str, float]:
        """Trains on a batch, and sends the pushes that are due."""
        metrics = self._worker.train(batch)
        if self._worker.phase == PUSH and not self._worker.island.pulls_before_push:
            self._worker.push()
        return metrics

    def snapshot(self) -> dict[str, np.ndarray]:
        """The island's state."""
        return self._worker.snapshot()

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        """Takes the state of a snapshot."""
        self._worker.restore(snapshot)

    def spans(self) -> list[Span]:
        """The activities of the island."""
        return self._worker.spans()

    def pid(self) -> int:
        """The id of this process."""
        return os.getpid()
