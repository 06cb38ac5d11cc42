"""Times the steps of programs that take turns on one machine."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

WARM_STEPS = 3
"""First steps of a program that do not count."""


class Timed:
    """Steps of one program, with the seconds that they took.

    Args:
      step: (state, batch) -> (state, loss).
      state: of the program.
      batch: on the devices.
    """

    def __init__(self, step: Callable[[Any, Any], Any], state: Any, batch: Any):
        self._step, self._state, self._batch = step, state, batch
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def run(self) -> float:
        """Does one step, and returns its loss."""
        cpu, wall = time.process_time(), time.perf_counter()
        self._state, loss = self._step(self._state, self._batch)
        jax.block_until_ready((self._state, loss))
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)
        return float(loss)

    def medians(self) -> tuple[float, float]:
        """(CPU seconds, seconds) of a step, without the first ones."""
        return tuple(statistics.median(x[WARM_STEPS:]) for x in (self.cpu, self.wall))
