r"""Times islands in Ray while one of their processes is killed every few seconds.

    python -m experiments.benchmarks.islands_killed --recipe=tiny --layout=fsdp=2 \
        --set islands.workers=4 --set islands.servers=2 --set islands.replicas=2

Two runs train in turns, so that what else the machine does hits both alike. In the
turns of one of them the process of an island or of a server is killed (kill -9) every
`--every` seconds. At half time losses are compared, and the runs change roles: some
processes are faster than others. Prints the ratios of steps and of losses. Aim: at
least 0.97 of the steps over 10 minutes. Needs `pip install -e ".[islands]"`.
"""

import dataclasses
import functools
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence

from absl import flags

from experiments import data, recipes
from experiments.recipes.config import Config
from meshpar.commands import command_line
from meshpar.commands.devices import start_devices
from meshpar.islands.program import IslandsProgram
from meshpar.islands.ray_host import RayHost
from meshpar.runs.modes import ISLANDS
from meshpar.settings import Number

SECONDS = flags.DEFINE_integer("seconds", 600, "Seconds with kills, and without.")
EVERY = flags.DEFINE_integer("every", 30, "Seconds between two kills.")
_KILLS_PER_TURN = 2

command_line.limit(SECONDS, Number(1, 100_000, "seconds"))
command_line.limit(EVERY, Number(1, 100_000, "seconds"))


def kill(host: RayHost, number: int) -> None:
    """Kills the process of an island or of a server, in turns."""
    islands, servers = host.pids()
    processes = list((servers if number % 2 else islands).values())
    os.kill(processes[number // 2 % len(processes)], signal.SIGKILL)


@dataclasses.dataclass
class Tally:
    """Steps, seconds and kills of some turns."""

    steps: int = 0
    seconds: float = 0.0
    kills: int = 0

    def __str__(self) -> str:
        rate = f"{self.steps / self.seconds:.3f} per second"
        time_ = f"{self.steps} steps in {self.seconds:.0f} s"
        return f"{time_} with {self.kills} kills, {rate}"


class Run:
    """Islands that train for some time, and rest."""

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
        while len(busy) < config.islands.workers:  # All have compiled the step.
            busy |= {name for name in self._step() if name.startswith("clock/")}
        program.host.drain()

    def _step(self) -> Mapping[str, float]:
        batch = next(self._batches)
        self._state, metrics = self._program.step(self._state, batch)
        return metrics

    def train(self, seconds: float, every: float, tally: Tally) -> None:
        """Trains for a turn, and waits until all islands are done.

        Args:
          seconds: that it takes.
          every: seconds between two kills; the first comes after half of them.
          tally: of such turns, to which this one is added.
        """
        start, due = time.monotonic(), every / 2
        while (passed := time.monotonic() - start) < seconds:
            if passed >= due:
                kill(self._program.host, tally.kills)
                tally.kills, due = tally.kills + 1, due + every
            self._step()
            tally.steps += 1
        self._program.host.drain()
        tally.seconds += time.monotonic() - start

    def loss(self) -> float:
        """The held-out loss."""
        held_out = data.held_out_batches(
            self._corpus, limit=self._config.evaluation_batches, **self._shape
        )
        evaluate = functools.partial(self._program.evaluate, self._state)
        return held_out.metric_sums(self._program, evaluate).result()["loss"]


def main(_: Sequence[str]) -> int:
    """Prints both runs and their ratios, and returns the exit code."""
    config = recipes.of_decoder(command_line.config_from_flags())
    settings = dataclasses.replace(config.islands, host="ray")
    config = dataclasses.replace(config, optimizer_mode=ISLANDS, islands=settings)
    corpus = data.load(config.data)
    config = config.fitted(corpus)
    layout, devices = start_devices(config)
    programs = [config.make_program(layout, devices) for _ in range(2)]
    whole, killed = [Run(config, corpus, program) for program in programs]
    without, with_kills = Tally(), Tally()
    turn, half = _KILLS_PER_TURN * EVERY.value, SECONDS.value / 2
    for end in (half, 2 * half):
        while with_kills.seconds < end:
            whole.train(turn, math.inf, without)
            killed.train(turn, EVERY.value, with_kills)
            print(f"{without}\n{with_kills}", flush=True)
        if end == half:
            losses = killed.loss(), whole.loss()
        whole, killed = killed, whole
    for program in programs:
        program.close()
    rates = [tally.steps / tally.seconds for tally in (with_kills, without)]
    print(f"ratio of steps per second: {rates[0] / rates[1]:.3f}")
    print(f"ratio of losses at half time: {losses[0] / losses[1]:.3f}")
    return 0


if __name__ == "__main__":
    command_line.run(
        main,
        (
            *command_line.of_config_but(command_line.OPTIMIZER_MODE),
            *command_line.OF_DEVICES,
        ),
        known=recipes.CATALOG,
    )
