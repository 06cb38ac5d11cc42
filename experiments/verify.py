r"""Proves that a layout trains the model of a plain loop, and keeps its contract.

    python -m experiments.verify --recipe=tiny --layout="fsdp=4,tensor=2"
    python -m experiments.verify --recipe=tiny --random=20 --seed=1
    python -m experiments.verify --recipe=tiny --random=50 --optimizers

The judge is a training loop of plain jax and optax on one device, which shares nothing
with the lowerings. Prints a table and a verdict. Exits 0 if every tensor is equal
within rounding and the compiled program moves what the layout declares; otherwise exits
1 with the first tensor that differs or the collectives that are wrong. With --random,
it draws layouts, prints a line for each and exits 1 if any is wrong; with --optimizers
it draws an optimizer of optax and the weights of tokens for each of them, too.
"""

import dataclasses
import itertools
import json
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from absl import flags

import meshpar
from experiments import command_line, data, optimizers
from experiments.devices import start_devices
from experiments.recipes import building
from experiments.recipes.config import Config
from experiments.recipes.errors import ConfigError
from experiments.recipes.modes import SYNCHRONOUS
from experiments.reports import verification
from meshpar.explain import judge, random_layouts, verify
from meshpar.layouts.axes import EXPERT
from meshpar.settings import Number

VERIFY_STEPS = flags.DEFINE_integer("verify_steps", 3, "Steps to compare.")
MAX_ERROR = flags.DEFINE_float(
    "tolerance", None, "Largest relative error; the rounding error by default."
)
RANDOM = flags.DEFINE_integer(
    "random", 0, "Number of random layouts to verify in place of --layout."
)
OPTIMIZERS = flags.DEFINE_bool(
    "optimizers", False, "With --random: draw optimizers of optax and losses, too."
)
PADDED = flags.DEFINE_bool(
    "padded", False, "Weigh tokens, and pad the rows of every batch unevenly."
)
JSON = flags.DEFINE_bool("json", False, "Print JSON instead of a table.")
command_line.limit(VERIFY_STEPS, Number(1, 10_000, "steps"))
command_line.limit(MAX_ERROR, Number(0, 1, whole=False))
command_line.limit(RANDOM, Number(0, 10_000, "layouts", "0 to verify --layout"))

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
"""Largest relative error that rounding explains, by compute dtype."""


def main(_: Sequence[str]) -> int:
    """Verifies, and returns the exit code."""
    config = command_line.config_from_flags()
    if config.optimizer_mode != SYNCHRONOUS:
        raise ConfigError(
            f"optimizer_mode={config.optimizer_mode}: replicas that train apart do not "
            "equal one device; use data in place of replica, and leave out the mode"
        )
    if RANDOM.value and (command_line.LAYOUT.value or JSON.value):
        raise ConfigError("--random draws layouts: leave out --layout and --json")
    if OPTIMIZERS.value and not RANDOM.value:
        raise ConfigError("--optimizers draws programs at random: add --random=N")
    layout, devices = start_devices(config)
    corpus = data.load(config.data)
    config = building.fit_vocabulary(config, corpus)
    batches = data.training_batches(
        corpus,
        length=config.model.length,
        batch_size=config.batch_size,
        seed=config.seed,
        rows=range(config.batch_size),
        position=0,
    )
    batches = list(itertools.islice(batches, VERIFY_STEPS.value))
    if PADDED.value:
        batches = [data.padded_unevenly(batch) for batch in batches]
    with jax.default_matmul_precision("highest"):
        if RANDOM.value:
            return _verify_random(config, devices, batches)
        return _verify_one(config, layout, devices, batches)


def _tolerance(config: Config) -> float:
    rounding = TOLERANCE[config.compute_dtype]
    return rounding if MAX_ERROR.value is None else MAX_ERROR.value


def _verify_one(
    config: Config,
    layout: meshpar.Layout,
    devices: Sequence[jax.Device],
    batches: Sequence[Any],
) -> int:
    """Verifies one layout, prints the report and returns the exit code."""
    program = building.make_program(config, layout, devices, PADDED.value)
    reference = _second_opinion(config, layout, program, devices)
    report = verify.verify(program, reference, batches, config.seed, _tolerance(config))
    if JSON.value:
        print(json.dumps(verification.as_dict(report, layout)))
    else:
        num_collectives = len(program.collectives)
        verification.print_report(report, layout, len(batches), num_collectives)
    return 0 if report.ok else 1


def _second_opinion(
    config: Config,
    layout: meshpar.Layout,
    program: meshpar.TrainProgram,
    devices: Sequence[jax.Device],
) -> meshpar.TrainProgram | None:
    """The program on one device, where no plain loop can judge; else None."""
    needs_equal = config.model.depends_on_microbatches
    microbatches = layout.microbatches if needs_equal else 1
    why = f"its loss depends on microbatches={microbatches}"
    reason = why if microbatches > 1 else judge.reason_no_judge(program)
    if not reason:
        return None
    print(f"judged by the same program on one device: {reason}", file=sys.stderr)
    one_device = dataclasses.replace(meshpar.Layout(), microbatches=microbatches)
    return building.make_program(config, one_device, devices[:1], PADDED.value)


def _verify_random(
    config: Config, devices: Sequence[jax.Device], batches: Sequence[Any]
) -> int:
    """Verifies random layouts, prints their outcomes and returns the exit code."""
    experts = (EXPERT,) if config.model.num_experts else ()
    axes = (*random_layouts.DRAWN_AXES, *experts)
    draws = random_layouts.draw_layouts(RANDOM.value, len(devices), config.seed, axes)
    if OPTIMIZERS.value:
        rng = random.Random(config.seed)
        outcomes = itertools.chain.from_iterable(
            _verify_drawn(config, devices, batches, draw, rng) for draw in draws
        )
    else:
        outcomes = _verify_all(config, devices, batches, draws, PADDED.value)
    counts = verification.print_outcomes(outcomes)
    return 1 if counts[random_layouts.WRONG] else 0


def _verify_all(
    config: Config,
    devices: Sequence[jax.Device],
    batches: Sequence[Any],
    draws: Sequence[random_layouts.Draw],
    padded: bool,
    optimizer: Any = None,
) -> Iterator[random_layouts.Outcome]:
    """The outcomes of layouts with one optimizer."""

    def lower(layout: meshpar.Layout, lowering: str) -> meshpar.TrainProgram:
        own = dataclasses.replace(config, lowering=lowering or config.lowering)
        own_devices = devices[: layout.num_devices]
        return building.make_program(own, layout, own_devices, padded, optimizer)

    return random_layouts.verify_layouts(
        lower,
        draws,
        batches,
        seed=config.seed,
        tolerance=_tolerance(config),
        by_microbatches=config.model.depends_on_microbatches,
    )


def _verify_drawn(
    config: Config,
    devices: Sequence[jax.Device],
    batches: Sequence[Any],
    draw: random_layouts.Draw,
    rng: random.Random,
) -> Iterator[random_layouts.Outcome]:
    """The outcome of one layout with an optimizer and weights of tokens at random."""
    name, padded = rng.choice(sorted(optimizers.OPTIMIZERS)), rng.random() < 0.5
    clip_norm = rng.choice((0.0, 0.0, 0.1))
    rates = dataclasses.replace(config.optimizer, clip_norm=clip_norm)
    config = dataclasses.replace(config, optimizer=rates)
    if padded and not PADDED.value:
        batches = [data.padded_unevenly(batch) for batch in batches]
    more = f"optimizer={name!r}" + (f" clip_norm={clip_norm}" if clip_norm else "")
    draw = dataclasses.replace(draw, more=more + (" padded" if padded else ""))
    optimizer = optimizers.OPTIMIZERS[name]
    padded = padded or PADDED.value
    yield from _verify_all(config, devices, batches, [draw], padded, optimizer)


if __name__ == "__main__":
    command_line.run(
        main,
        (
            *command_line.of_config_but(command_line.OPTIMIZER_MODE),
            *command_line.OF_DEVICES,
        ),
        because={"optimizer_mode": "replicas that train apart do not equal one device"},
    )
