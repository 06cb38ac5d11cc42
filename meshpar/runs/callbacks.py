"""The functions of a user that a run calls."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from meshpar.lowering.train_program import TrainProgram
from meshpar.runs.config import RunConfig
from meshpar.runs.run import Run


class Callbacks:
    """The functions of a run, and the checkpoints that one of them waits for."""

    def __init__(self, config: RunConfig, run: Run, checkpoints: pathlib.Path):
        """Calls nothing yet.

        Args:
          config: the settings, which name the file of an error.
          run: has the functions.
          checkpoints: the folder of checkpoints.
        """
        self._config, self._run, self._folder = config, run, checkpoints
        self._begun: list[int] = []

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Tells of the metrics of a step."""
        if self._run.after_step:
            with self._config.blaming_recipe():
                self._run.after_step(step, dict(metrics))

    def evaluation(
        self, step: int, metrics: Mapping[str, Any], program: TrainProgram, state: Any
    ) -> None:
        """Tells of the metrics of an evaluation."""
        if self._run.after_evaluation:
            with self._config.blaming_recipe():
                self._run.after_evaluation(step, dict(metrics), program, state)

    def saving(self, step: int) -> None:
        """Notes a checkpoint that is being written; the one before is complete."""
        self.look()
        if self._run.after_checkpoint and jax.process_index() == 0:
            self._begun.append(step)

    def look(self) -> None:
        """Tells of the checkpoints that are complete, but for those removed again."""
        complete = [step for step in self._begun if self._of(step).is_dir()]
        if not complete:
            return
        # They are written one after the other.
        self._begun = [step for step in self._begun if step > complete[-1]]
        for step in complete:
            with self._config.blaming_recipe():
                self._run.after_checkpoint(step, self._of(step))

    def _of(self, step: int) -> pathlib.Path:
        return self._folder / str(step)
