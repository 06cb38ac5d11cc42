r"""Times islands in Ray while one of their processes is killed every few seconds.

    python -m experiments.benchmarks.islands_killed --recipe=tiny --layout=fsdp=2 \
        --set islands.workers=4 --set islands.servers=2 --set islands.replicas=2

Trains twice for the same time, without and with kills (kill -9 of an island's or a
server's process in turns), and prints the ratios of steps and of losses. Aim: at least
0.97 of the steps over 10 minutes. Needs `pip install -e ".[islands]"`.
"""

import dataclasses
import os
import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from absl import flags

import meshpar
from experiments import command_line, data
from experiments.devices import start_devices
from experiments.recipes import building
from experiments.recipes.config import Config
from experiments.recipes.modes import ISLANDS
from experiments.recipes.ranges import Number
from meshpar.islands.ray_host import RayHost

flags.adopt_module_key_flags(command_line)
SECONDS = flags.DEFINE_integer("seconds", 600, "Seconds of training, each time.")
EVERY = flags.DEFINE_integer("every", 30, "Seconds between two kills.")
command_line.limit(SECONDS, Number(1, 100_000, "seconds"))
command_line.limit(EVERY, Number(1, 100_000, "seconds"))


class Trained(NamedTuple):
    """A run: steps that were done, kills, and the held-out loss."""

    steps: int
    kills: int
    loss: float


def kill(host: RayHost, number: int) -> None:
    """Kills the process of an island or of a server, in turns."""
    islands, servers = host.pids()
    processes = list((servers if number % 2 else islands).values())
    os.kill(processes[number // 2 % len(processes)], signal.SIGKILL)


def train(
    config: Config,
    corpus: data.Corpus,
    program: meshpar.TrainProgram,
    every: float = float("inf"),
) -> Trained:
    """Trains for `--seconds`, with a kill every so many seconds."""
    shape = dict(
        length=config.model.length,
        batch_size=config.batch_size,
        rows=program.batch_rows,
    )
    batches = data.training_batches(corpus, seed=config.seed, position=0, **shape)
    state, busy = program.init(config.seed), set()
    while len(busy) < config.islands.workers:  # All have compiled the step.
        state, metrics = program.step(state, next(batches))
        busy |= {name for name in metrics if name.startswith("clock/")}
    start, steps, kills = time.monotonic(), 0, 0
    while (passed := time.monotonic() - start) < SECONDS.value:
        if passed >= (kills + 1) * every:
            kill(program.host, kills)
            kills += 1
        state, _ = program.step(state, next(batches))
        steps += 1
    held_out = data.held_out_batches(corpus, limit=config.evaluation_batches, **shape)
    sums = program.metric_sums()
    for batch in held_out:
        sums.add(program.evaluate(state, batch))
    program.close()
    return Trained(steps, kills, sums.result()["loss"])


def main(_: Sequence[str]) -> int:
    """Prints both runs and their ratios, and returns the exit code."""
    config = command_line.config_from_flags()
    settings = dataclasses.replace(config.islands, host="ray")
    config = dataclasses.replace(config, optimizer_mode=ISLANDS, islands=settings)
    corpus = data.load(config.data)
    config = building.fit_vocabulary(config, corpus)
    layout, devices = start_devices(config)
    runs = []
    for name, every in (("without", float("inf")), ("with", EVERY.value)):
        program = building.make_program(config, layout, devices)
        runs.append(run := train(config, corpus, program, every))
        print(
            f"{name} kills: {run.steps} steps, {run.kills} kills, loss {run.loss:.4f}",
            flush=True,
        )
    whole, killed = runs
    print(f"ratio of steps: {killed.steps / max(1, whole.steps):.3f}")
    print(f"ratio of losses: {killed.loss / whole.loss:.3f}")
    return 0


if __name__ == "__main__":
    command_line.run(main)
