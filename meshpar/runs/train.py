"""`train`: a whole run in a script or a notebook."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

from meshpar.arrays import Params
from meshpar.errors import ConfigError, nearest
from meshpar.layouts.layout import Layout
from meshpar.lowering.train_program import TrainProgram
from meshpar.runs import metrics
from meshpar.runs.chosen_layout import chosen_layout
from meshpar.runs.config import RunConfig
from meshpar.runs.run import Run
from meshpar.runs.start import LAST_GOOD, NEWEST, Consent
from meshpar.runs.trainer import RESTART, Trainer


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run that has ended.

    Attributes:
      state: the training state after the last step.
      program: the program that trained it.
      folder: of metrics, checkpoints and plot.
      stopped: whether a signal ended it before its last step; the same call goes on.
    """

    state: Any
    program: TrainProgram
    folder: pathlib.Path
    stopped: bool

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl, {"step": step, name: value}, in order."""
        return metrics.read(self.folder / metrics.METRICS)

    def weights(self) -> Params:
        """The trained weights, {path in the module: array}."""
        return self.program.weights(self.state)


def train(
    run: Run,
    *,
    workdir: str | os.PathLike[str],
    layout: Layout | str = "",
    devices: Sequence[jax.Device] | None = None,
    start_anew: bool = False,
    allow_changes: bool = False,
    resume: str = NEWEST,
    **settings: Any,
) -> Trained:
    """Trains a run, with checkpoints, evaluation and metrics in a folder.

    It is the loop of `meshpar run`: the same call goes on where the run stopped, also
    under another layout. Call `meshpar.simulate(n)` first for simulated devices.

    Args:
      run: what to train.
      workdir: folder of metrics, checkpoints and plot.
      layout: the layout; all devices along `data` by default, and "auto" takes the
        planner's best.
      devices: devices to fill; all by default.
      start_anew: whether to start at step 0 where the checkpoints are gone.
      allow_changes: whether to resume with other data or another seed.
      resume: "newest", or "last_good" to set aside checkpoints that are not finite.
      **settings: other settings of a run by their names, such as steps=1000 and
        batch_size=64; docs/settings.md lists them.

    Returns:
      The run, when it is done or a signal has stopped it.

    Raises:
      ConfigError: a setting that does not exist, or a value out of its range.
      MeshparError: a model, layout, data or folder that do not fit.
    """
    checked, workdir = run.checked(), os.fspath(workdir)

    class Given(RunConfig):
        """The configuration of the run that is given."""

        def prepared(self) -> tuple[RunConfig, Run]:
            return self, checked

    names = {field.name for field in dataclasses.fields(RunConfig)}
    if unknown := sorted(settings.keys() - names):
        raise ConfigError(
            f"train({unknown[0]}=...): no such setting ({nearest(unknown[0], names)})"
        )
    config = Given("meshpar.train", layout=str(layout), workdir=workdir, **settings)
    folder = pathlib.Path(workdir).absolute()
    devices = jax.devices() if devices is None else devices
    chosen, planned = chosen_layout(config, devices, folder, print)
    config = dataclasses.replace(config, layout=str(chosen))
    if resume not in (NEWEST, LAST_GOOD):
        raise ConfigError(f"train(resume={resume!r}): use {NEWEST!r} or {LAST_GOOD!r}")
    consent = Consent(start_anew, allow_changes, last_good=resume == LAST_GOOD)
    trainer = Trainer(config, chosen, devices, consent=consent, planned=planned)
    stopped = trainer.run() == RESTART
    return Trained(trainer.state, trainer.program, folder, stopped)
