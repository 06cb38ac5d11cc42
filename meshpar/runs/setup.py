"""Setup of a run: reads the data and lowers the program, before anything is written."""

import dataclasses
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from meshpar.errors import ConfigError, DataError, shown
from meshpar.layouts.layout import Layout
from meshpar.lowering.train_program import TrainProgram
from meshpar.runs import compiled, programs, repeats
from meshpar.runs.config import RunConfig
from meshpar.runs.data import Place
from meshpar.runs.fallbacks import Fallbacks
from meshpar.runs.modes import ISLANDS
from meshpar.runs.planned_layout import PlannedLayout
from meshpar.runs.run import Run

_QUICK_S = 5.0
"""The function of a file that is as quick is called a second time, to compare."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything that a run needs before its first step.

    Attributes:
      config: the configuration, with what the data says.
      run: what it trains.
      program: the lowered program.
      folder: absolute path of metrics, checkpoints and plot.
      profile: whether to write a profiler trace of a few steps.
      planned: the layout, if the planner took it.
      facts: what it is made of, as processes and starts compare it.
      baseline: name and value of the loss to beat; None without one.
    """

    config: RunConfig
    run: Run
    program: TrainProgram
    folder: pathlib.Path
    profile: bool
    planned: PlannedLayout | None
    facts: Mapping[str, str]
    baseline: tuple[str, float] | None

    def place(self, position: int = 0, state: Any = None) -> Place:
        """The part of the batches that this process reads.

        Args:
          position: number of samples used before.
          state: that of the data's iterator there.
        """
        config, rows = self.config, self.program.batch_rows
        return Place(config.batch_size, rows, config.seed, position, state)

    @property
    def identity(self) -> dict[str, str | int]:
        """The values that may not change when a run resumes."""
        own = self.run.identity
        return {repeats.DATA: self.facts[repeats.DATA], **own, "seed": self.config.seed}

    @property
    def step_program(self) -> dict[str, str]:
        """The hash of the lowered step, and what it depends on beside the run."""
        return {
            "hash": self.program.fingerprint,
            "jax": jax.__version__,
            "device": self.program.mesh.devices.flat[0].device_kind,
        }


def folder_of(config: RunConfig) -> pathlib.Path:
    """The folder of a run, absolute."""
    name = config.recipe.rpartition("/")[2].replace(".py:", ".").replace(":", ".")
    return pathlib.Path(config.workdir or f"runs/{name}").absolute()


def prepare(
    config: RunConfig,
    layout: Layout,
    devices: Sequence[jax.Device],
    profile: bool = False,
    fallbacks: Fallbacks | None = None,
    planned: PlannedLayout | None = None,
) -> Setup:
    """Reads the data and lowers the program; nothing is written or compiled yet.

    Args:
      config: the run.
      layout: its layout.
      devices: the devices to fill.
      profile: whether to write a profiler trace of a few steps.
      fallbacks: layouts in which the run may go on in fewer processes.
      planned: the layout, if the planner took it.

    Raises:
      MeshparError: folders, data, layout or model that do not fit.
    """
    if "://" in config.workdir:
        raise ConfigError(
            f"workdir={config.workdir}: give a folder that all hosts see, such as a "
            "mounted bucket"
        )
    every = config.checkpoint_local_every
    if every < 0 or (every and not config.checkpoint_local_dir):
        raise ConfigError(
            f"checkpoint_local_every={every}: use 0 or more, and name a "
            "--checkpoint_local_dir"
        )
    if config.check_replicas and config.optimizer_mode == ISLANDS:
        raise ConfigError(
            f"check_replicas={config.check_replicas}: islands have weights of their "
            "own, which are no copies; leave it out"
        )
    folder = folder_of(config)
    compiled.keep_programs(folder)
    begin = time.monotonic()
    config, run = config.prepared()
    is_quick = time.monotonic() - begin < _QUICK_S
    with config.blaming_recipe():
        _check_samples(config, run)
        _check_evaluation(config, run)
        facts, baseline = repeats.facts(run), _baseline(run)
        again = config.prepared()[1] if config.code and is_quick else run
        repeats.check(config.recipe, facts, repeats.facts(again))
    program = programs.make_program(config, run, layout, devices)
    if fallbacks:
        fallbacks.check(
            lambda other: programs.make_program(
                config, run, other, devices[: other.num_devices]
            ),
            layout.num_devices,
        )
    return Setup(config, run, program, folder, profile, planned, facts, baseline)


def _baseline(run: Run) -> tuple[str, float] | None:
    """Name and value of the loss to beat; None without one."""
    if run.baseline is None:
        return None
    name, loss = run.baseline
    value = loss()
    try:
        return name, float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Run(baseline={shown(repr(run.baseline))}): its function returns "
            f"{shown(repr(value))}; return a number"
        ) from error


def _check_evaluation(config: RunConfig, run: Run) -> None:
    """Raises DataError for evaluation data of another form than the training data."""
    if not run.evaluates or run.evaluation is run.data:
        return
    batches = [x.abstract_batch(config.batch_size) for x in (run.data, run.evaluation)]
    shapes, other = (
        {
            jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}"
            for path, x in jax.tree_util.tree_leaves_with_path(batch)
        }
        for batch in batches
    )
    if shapes != other:
        raise DataError(
            f"batches to evaluate on are {shown(str(other))}, and batches to train on "
            f"{shown(str(shapes))}; give both the same leaves and shapes"
        )


def _check_samples(config: RunConfig, run: Run) -> None:
    """Raises DataError for less than a batch, or data that end before the last step."""
    run.data.check_batch_size(config.batch_size)
    needed = config.steps * config.batch_size
    if run.data.num_samples < needed:
        raise DataError(
            f"{config.steps} steps of batch_size={config.batch_size} take {needed:,} "
            f"samples, and the data hold {run.data.num_samples:,}; add .repeat() to "
            "the dataset, or take fewer steps"
        )
