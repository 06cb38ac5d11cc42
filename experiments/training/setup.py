"""Setup of a run: reads the data and lowers the program, before anything is written."""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

import meshpar
from experiments import data
from experiments.recipes import building
from experiments.recipes.config import Config
from experiments.recipes.errors import ConfigError
from experiments.training import compiled
from experiments.training.fallbacks import Fallbacks
from experiments.training.planned_layout import PlannedLayout


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything that a run needs before its first step.

    Attributes:
      config: the configuration, with the vocabulary of the data.
      corpus: the data.
      program: the lowered program.
      folder: absolute path of metrics, checkpoints and plot.
      profile: whether to write a profiler trace of a few steps.
      planned: the layout, if the planner took it.
    """

    config: Config
    corpus: data.Corpus
    program: meshpar.TrainProgram
    folder: pathlib.Path
    profile: bool
    planned: PlannedLayout | None

    @functools.cached_property
    def unigram_loss(self) -> float:
        """Loss that a model must beat to have learned from context, in nats."""
        return data.unigram_loss(self.corpus)

    @functools.cached_property
    def batch_shape(self) -> dict[str, Any]:
        """Arguments of `data.training_batches` and `data.held_out_batches`."""
        return dict(
            length=self.config.model.length,
            batch_size=self.config.batch_size,
            rows=self.program.batch_rows,
        )

    @property
    def identity(self) -> dict[str, str | int]:
        """The values that may not change when a run resumes."""
        return building.identity(self.config, self.corpus)


def folder_of(config: Config) -> pathlib.Path:
    """The folder of a run, absolute."""
    return pathlib.Path(config.workdir or f"runs/{config.recipe}").absolute()


def prepare(
    config: Config,
    layout: meshpar.Layout,
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
    folder = folder_of(config)
    compiled.keep_programs(folder)
    corpus = data.load(config.data)
    config = building.fit_vocabulary(config, corpus)
    program = building.make_program(config, layout, devices)
    if fallbacks:
        fallbacks.check(
            lambda other: building.make_program(
                config, other, devices[: other.num_devices]
            ),
            layout.num_devices,
        )
    return Setup(config, corpus, program, folder, profile, planned)
