r"""Times islands in Ray while one of their processes is killed every few seconds.

    python -m experiments.benchmarks.islands_killed --recipe=tiny --layout=fsdp=2 \
        --set islands.workers=4 --set islands.servers=2 --set islands.replicas=2

Two runs train in turns, so that what else the machine does hits both alike. In the
turns of one of them the process of an island or of a server is killed (kill -9) every
`--every` seconds. Prints the ratios of steps and of losses. Aim: at least 0.97 of the
steps over 10 minutes each. Needs `pip install -e ".[islands]"`.
"""

import dataclasses
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence

from absl import flags

from experiments import command_line, data
from experiments.devices import start_devices
from experiments.recipes import building
from experiments.recipes.config import Config
from experiments.recipes.modes import ISLANDS
from experiments.recipes.ranges import Number
from meshpar.islands.program import IslandsProgram
from meshpar.islands.ray_host import RayHost

flags.adopt_module_key_flags(command_line)
SECONDS = flags.DEFINE_integer("seconds", 600, "Seconds of training, of each run.")
EVERY = flags.DEFINE_integer("every", 30, "Seconds between two kills.")
_KILLS_PER_TURN = 2

command_line.limit(SECONDS, Number(1, 100_000, "seconds"))
command_line.limit(EVERY, Number(1, 100_000, "seconds"))


def kill(host: RayHost, number: int) -> None:
    """Kills the process of an island or of a server, in turns."""
    islands, servers = host.pids()
    processes = list((servers if number % 2 else islands).values())
    os.kill(processes[number // 2 % len(processes)], signal.SIGKILL)


class Run:
    """Islands that train for some time, and rest.

    Attributes:
      steps: done.
      kills: processes killed.
      seconds: of training.
    """

    def __init__(self, config: Config, corpus: data.Corpus, program: IslandsProgram):
        self._config, self._corpus, self._program = config, corpus, program
        self._shape = dict(
            length=config.model.length,
            batch_size=config.batch_size,
            rows=program.batch_rows,
        )
        self._batches = data.training_batches(
            corpus, seed=config.seed, position=0, **self._shape
        )
        self._state, busy = program.init(config.seed), set()
        self.steps = self.kills = 0
        self.seconds = 0.0
        while len(busy) < config.islands.workers:  # All have compiled the step.
            busy |= {name for name in self._step() if name.startswith("clock/")}
        program.host.drain()

    def _step(self) -> Mapping[str, float]:
        batch = next(self._batches)
        self._state, metrics = self._program.step(self._state, batch)
        return metrics

    def train(self, seconds: float, every: float) -> None:
        """Trains for a turn, and waits until all islands are done.

        Args:
          seconds: that it takes.
          every: seconds between two kills; the first comes after half of them.
        """
        start, due = time.monotonic(), every / 2
        while (passed := time.monotonic() - start) < seconds:
            if passed >= due:
                kill(self._program.host, self.kills)
                self.kills, due = self.kills + 1, due + every
            self._step()
            self.steps += 1
        self._program.host.drain()
        self.seconds += time.monotonic() - start

    def loss(self) -> float:
        """The held-out loss; ends the islands."""
        held_out = data.held_out_batches(
            self._corpus, limit=self._config.evaluation_batches, **self._shape
        )
        sums = self._program.metric_sums()
        for batch in held_out:
            sums.add(self._program.evaluate(self._state, batch))
        self._program.close()
        return sums.result()["loss"]


def main(_: Sequence[str]) -> int:
    """Prints both runs and their ratios, and returns the exit code."""
    config = command_line.config_from_flags()
    settings = dataclasses.replace(config.islands, host="ray")
    config = dataclasses.replace(config, optimizer_mode=ISLANDS, islands=settings)
    corpus = data.load(config.data)
    config = building.fit_vocabulary(config, corpus)
    layout, devices = start_devices(config)
    programs = [building.make_program(config, layout, devices) for _ in range(2)]
    whole, killed = runs = [Run(config, corpus, program) for program in programs]
    turn = _KILLS_PER_TURN * EVERY.value
    while killed.seconds < SECONDS.value:
        whole.train(turn, math.inf)
        killed.train(turn, EVERY.value)
    rates = [run.steps / run.seconds for run in runs]
    losses = [run.loss() for run in runs]
    for run, rate, loss in zip(runs, rates, losses, strict=True):
        print(
            f"{run.kills} kills: {run.steps} steps in {run.seconds:.0f} s, "
            f"{rate:.3f} per second, loss {loss:.4f}"
        )
    print(f"ratio of steps per second: {rates[1] / rates[0]:.3f}")
    print(f"ratio of losses: {losses[1] / losses[0]:.3f}")
    return 0


if __name__ == "__main__":
    command_line.run(main)
