"""Times the steps of programs that take turns on one machine."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from absl import flags

from meshpar.commands import command_line
from meshpar.settings import Number

flags.disclaim_key_flags()  # They belong to the benchmark that defines them.

WARM_STEPS = 3
"""First steps of a program that do not count."""


class LayerFlags(NamedTuple):
    """Flags of a benchmark of equal layers: how large they are, and how many steps."""

    width: flags.FlagHolder
    depth: flags.FlagHolder
    rows: flags.FlagHolder
    rounds: flags.FlagHolder


def define_layer_flags(depth: int, rows: int, rounds: int) -> LayerFlags:
    """Defines --width, --depth, --rows and --rounds.

    Args:
      depth: default number of layers.
      rows: default rows of a batch.
      rounds: default number of timed steps.
    """
    found = LayerFlags(
        flags.DEFINE_integer("width", 256, "Width of the layers."),
        flags.DEFINE_integer("depth", depth, "Number of layers."),
        flags.DEFINE_integer("rows", rows, "Rows of a batch."),
        flags.DEFINE_integer("rounds", rounds, "Timed steps of each program."),
    )
    command_line.limit(found.width, Number(1, 10**5, "units"))
    command_line.limit(found.depth, Number(1, 1000, "layers"))
    command_line.limit(found.rows, Number(1, 10**7, "rows"))
    command_line.limit(found.rounds, Number(WARM_STEPS + 1, 10**6, "steps"))
    return found


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
