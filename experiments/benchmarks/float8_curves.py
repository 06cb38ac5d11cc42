r"""Compares loss curves in float8 with those in bfloat16, over seeds.

    python -m experiments.benchmarks.float8_curves --steps=300

Both train the same model on the same text from the same weights, with bfloat16 beside
float8. The curve of a seed has the mean loss of each tenth of the steps. What float8
adds is a mean over seeds, and the noise is the standard deviation of bfloat16's curves
over seeds. The exit code is 1 if float8 adds more than the noise in any tenth, or to
the loss on held-out text.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import rich.table
from absl import flags

import meshpar
from experiments import recipes
from experiments.recipes.config import Config
from meshpar.commands import command_line
from meshpar.commands.devices import start_devices
from meshpar.commands.reports import terminal
from meshpar.errors import ConfigError
from meshpar.runs.config import check_setting
from meshpar.runs.data import Data, Place
from meshpar.settings import Number

RUNS = flags.DEFINE_integer("runs", 5, "Seeds with which each format trains.")
command_line.limit(RUNS, Number(2, 10_000, "seeds"))

PARTS = 10
"""Points of a curve."""

COLUMNS = *(f"{10 * i}%" for i in range(1, PARTS + 1)), "held out"


def curve(
    config: Config, tokens: Data, program: meshpar.TrainProgram, seed: int
) -> np.ndarray:
    """Mean losses of the parts of a run, then the loss on held-out text [PARTS + 1].

    Args:
      config: of the run.
      tokens: its data.
      program: that trains.
      seed: of the weights and of the order of the text.
    """
    place = Place(config.batch_size, program.batch_rows, seed)
    batches = iter(tokens.training_batches(place))
    held_out = tokens.evaluation_batches(place, config.evaluation_batches)
    state, losses = program.init(seed), []
    for _ in range(config.steps):
        state, metrics = program.step(state, next(batches))
        losses.append(metrics["loss"])
    parts = [np.mean(part) for part in np.array_split(np.array(losses), PARTS)]
    evaluate = functools.partial(program.evaluate, state)
    return np.array([*parts, held_out.metric_sums(program, evaluate).result()["loss"]])


def is_within_noise(bfloat16: np.ndarray, float8: np.ndarray) -> bool:
    """Whether float8 adds less to every point than seeds scatter.

    Args:
      bfloat16: curves [seeds, points].
      float8: of the same seeds.
    """
    noise = bfloat16.std(axis=0, ddof=1)
    return bool((np.abs((float8 - bfloat16).mean(axis=0)) <= noise).all())


def table(bfloat16: np.ndarray, float8: np.ndarray) -> rich.table.Table:
    """The means of both formats, what float8 adds, and the noise of seeds, by point.

    Args:
      bfloat16: curves [seeds, points].
      float8: of the same seeds.
    """
    added = float8 - bfloat16
    found = rich.table.Table("of the steps", "bfloat16", "float8", "added", "noise")
    rows = zip(
        COLUMNS,
        bfloat16.mean(axis=0),
        float8.mean(axis=0),
        added.mean(axis=0),
        bfloat16.std(axis=0, ddof=1),
        strict=True,
    )
    for name, before, after, more, noise in rows:
        found.add_row(
            name, f"{before:.4f}", f"{after:.4f}", f"{more:+.4f}", f"{noise:.4f}"
        )
    return found


def main(_: Sequence[str]) -> int:
    """Trains in both formats with each seed, and returns the exit code."""
    config = recipes.of_decoder(command_line.config_from_flags())
    if config.steps < PARTS:
        raise ConfigError(f"--steps={config.steps}: a curve needs {PARTS} steps")
    check_setting("seed", config.seed + RUNS.value - 1)
    layout, devices = start_devices(config)
    config, run = dataclasses.replace(config, compute_dtype="bfloat16").prepared()
    programs = {}
    for name in ("bfloat16", "float8"):
        model = dataclasses.replace(config.model, float8=name == "float8")
        programs[name] = dataclasses.replace(config, model=model).make_program(
            layout, devices
        )
    console, curves = terminal.plain_console(), {name: [] for name in programs}
    for seed in range(config.seed, config.seed + RUNS.value):
        for name, program in programs.items():
            found = curve(config, run.data, program, seed)
            curves[name].append(found)
            console.print(f"{name}, seed {seed}: held-out loss {found[-1]:.4f}")
    found = [np.stack(own) for own in curves.values()]
    console.print(table(*found))
    within = is_within_noise(*found)
    console.print(f"float8 is {'within' if within else 'beyond'} the noise of seeds")
    return 0 if within else 1


if __name__ == "__main__":
    command_line.run(
        main,
        (
            *command_line.of_config_but(command_line.OPTIMIZER_MODE),
            *command_line.OF_DEVICES,
        ),
        known=recipes.CATALOG,
    )
