r"""Proves that a layout trains the model of a plain loop, and keeps its contract.

    meshpar verify my_run.py:gpt --layout="fsdp=4,tensor=2"
    meshpar verify my_run.py:gpt --random=20 --seed=1
    meshpar verify my_run.py:gpt --random=50 --optimizers

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

from meshpar.commands import command_line, optimizers
from meshpar.commands.devices import start_devices
from meshpar.commands.reports import verification
from meshpar.errors import ConfigError
from meshpar.explain import judge, random_layouts, verify
from meshpar.layouts.axes import EXPERT, RECORDS
from meshpar.layouts.layout import Layout
from meshpar.lowering.train_program import TrainProgram
from meshpar.planner.plans import abstract_batch
from meshpar.runs import programs
from meshpar.runs.catalog import FILES_ALONE, Catalog
from meshpar.runs.config import RunConfig
from meshpar.runs.data import Place
from meshpar.runs.modes import SYNCHRONOUS
from meshpar.runs.run import Run
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

EXPERT_DIMS = {
    dim for axis in RECORDS if axis.name == EXPERT for dim in axis.param_dims
}
"""Names of dims that `expert` splits."""

TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
"""Largest relative error that rounding explains, by compute dtype."""


_NOT_READ = {"optimizer_mode": "replicas that train apart do not equal one device"}
TAKES = (
    *command_line.of_config_but(command_line.OPTIMIZER_MODE),
    *command_line.OF_DEVICES,
)
"""The shared flags that it reads."""


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
    config, run = config.prepared()
    with config.blaming_recipe():
        place = Place(config.batch_size, range(config.batch_size), config.seed)
        batches = run.data.training_batches(place)
        batches = list(itertools.islice(batches, VERIFY_STEPS.value))
    if PADDED.value:
        batches = _padded(config, run, batches)
    case = _Case(config, run, devices, batches)
    with jax.default_matmul_precision("highest"):
        return _verify_random(case) if RANDOM.value else _verify_one(case, layout)


def _padded(config: RunConfig, run: Run, batches: Sequence[Any]) -> list[Any]:
    """Batches with weights, their rows padded unevenly.

    Raises:
      ConfigError: the recipe says nothing about padding, or its function raises.
    """
    if run.padded is None:
        raise ConfigError(
            "--padded weighs tokens, and this recipe has no padded=(batch) -> batch "
            "with weights; add it to its meshpar.Run, or leave --padded out"
        )
    with config.blaming_recipe():
        return [run.padded(batch) for batch in batches]


@dataclasses.dataclass(frozen=True)
class _Case:
    """A run, its devices and batches, which every layout is verified with.

    Attributes:
      config: the settings.
      run: the model, the optimizer and the loss.
      devices: the devices.
      batches: a batch for every step.
    """

    config: RunConfig
    run: Run
    devices: Sequence[jax.Device]
    batches: Sequence[Any]

    @property
    def tolerance(self) -> float:
        """Largest relative error."""
        rounding = TOLERANCE[self.config.compute_dtype]
        return rounding if MAX_ERROR.value is None else MAX_ERROR.value

    def lower(
        self, layout: Layout, lowering: str = "", optimizer: Any = None
    ) -> TrainProgram:
        """The program under a layout."""
        config = self.config
        config = dataclasses.replace(config, lowering=lowering or config.lowering)
        devices = self.devices[: layout.num_devices]
        batch = abstract_batch(self.batches[0])
        return programs.make_program(
            config, self.run, layout, devices, batch, optimizer
        )


def _verify_one(case: _Case, layout: Layout) -> int:
    """Verifies one layout, prints the report and returns the exit code."""
    program = case.lower(layout)
    reference = _second_opinion(case, layout, program)
    seed, batches = case.config.seed, case.batches
    report = verify.verify(program, reference, batches, seed, case.tolerance)
    if JSON.value:
        print(json.dumps(verification.as_dict(report, layout)))
    else:
        num_collectives = len(program.collectives)
        verification.print_report(report, layout, len(batches), num_collectives)
    return 0 if report.ok else 1


def _second_opinion(
    case: _Case, layout: Layout, program: TrainProgram
) -> TrainProgram | None:
    """The program on one device, where no plain loop can judge; else None."""
    needs_equal = case.run.depends_on_microbatches
    microbatches = layout.microbatches if needs_equal else 1
    why = f"its loss depends on microbatches={microbatches}"
    reason = why if microbatches > 1 else judge.reason_no_judge(program)
    if not reason:
        return None
    print(f"judged by the same program on one device: {reason}", file=sys.stderr)
    return case.lower(dataclasses.replace(Layout(), microbatches=microbatches))


def _verify_random(case: _Case) -> int:
    """Verifies random layouts, prints their outcomes and returns the exit code."""
    case.lower(Layout())  # An error under every layout is no refusal of one.
    dims = {
        dim for param in case.run.model.params.values() for dim in param.names or ()
    }
    experts = (EXPERT,) if dims.intersection(EXPERT_DIMS) else ()
    axes = (*random_layouts.DRAWN_AXES, *experts)
    seed, number = case.config.seed, len(case.devices)
    draws = random_layouts.draw_layouts(RANDOM.value, number, seed, axes)
    if OPTIMIZERS.value:
        rng = random.Random(seed)
        outcomes = itertools.chain.from_iterable(
            _verify_drawn(case, draw, rng) for draw in draws
        )
    else:
        outcomes = _verify_all(case, draws)
    counts = verification.print_outcomes(outcomes)
    return 1 if counts[random_layouts.WRONG] else 0


def _verify_all(
    case: _Case, draws: Sequence[random_layouts.Draw], optimizer: Any = None
) -> Iterator[random_layouts.Outcome]:
    """The outcomes of layouts with one optimizer."""
    return random_layouts.verify_layouts(
        lambda layout, lowering: case.lower(layout, lowering, optimizer),
        draws,
        case.batches,
        seed=case.config.seed,
        tolerance=case.tolerance,
        by_microbatches=case.run.depends_on_microbatches,
    )


def _verify_drawn(
    case: _Case, draw: random_layouts.Draw, rng: random.Random
) -> Iterator[random_layouts.Outcome]:
    """The outcome of one layout with an optimizer and weights of tokens at random."""
    name, padded = rng.choice(sorted(optimizers.OPTIMIZERS)), rng.random() < 0.5
    clip_norm = rng.choice((0.0, 0.0, 0.1))
    run = dataclasses.replace(case.run, clip_norm=clip_norm or None)
    batches, padded = case.batches, padded and run.padded is not None
    if padded and not PADDED.value:
        batches = _padded(case.config, run, batches)
    more = f"optimizer={name!r}" + (f" clip_norm={clip_norm}" if clip_norm else "")
    draw = dataclasses.replace(draw, more=more + (" padded" if padded else ""))
    case = dataclasses.replace(case, run=run, batches=batches)
    yield from _verify_all(case, [draw], optimizers.OPTIMIZERS[name])


def start(known: Catalog = FILES_ALONE) -> None:
    """Runs the command.

    Args:
      known: the recipes that it knows by name.
    """
    command_line.run(main, TAKES, _NOT_READ, known=known)


if __name__ == "__main__":
    start()
