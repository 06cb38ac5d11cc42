"""The planner's predictions of programs that a compiler gives figures of."""

from typing import NamedTuple

from absl import flags

import meshpar
from experiments.benchmarks.compiled_programs import Compiled
from experiments.benchmarks.program_cases import Case
from experiments.recipes import optimizers
from meshpar import mesh
from meshpar.mesh.machine import machine_of
from meshpar.planner.candidate import Candidate, Candidates
from meshpar.planner.facts import Facts
from meshpar.runs import programs

MARKDOWN = flags.DEFINE_bool("markdown", False, "Print a table for the documentation.")


class Row(NamedTuple):
    """One program: its prediction, and its compiler's figures.

    Attributes:
      compiled: the compiler's word.
      candidate: the prediction.
      platform: of the machine.
    """

    compiled: Compiled
    candidate: Candidate
    platform: str

    @property
    def error(self) -> float:
        """Predicted memory over that of the compiled program, less one."""
        return self.candidate.memory.total / self.compiled.peak_bytes - 1

    @property
    def seconds(self) -> float:
        """Predicted time, of what the compiler estimates too."""
        return estimated_seconds(self.candidate)


def estimated_seconds(candidate: Candidate) -> float:
    """Predicted time without kernels and latency: compilers estimate neither."""
    seconds = candidate.seconds
    return seconds.total - seconds.kernels - seconds.latency


class Predictor:
    """Predicts programs; those of one model and machine share what is traced."""

    def __init__(self):
        self._made: dict[tuple[str, int, str], Candidates] = {}

    def row(self, compiled: Compiled) -> Row:
        """The prediction of a program, and its compiler's figures."""
        case = compiled.case
        made = self.candidates(case)
        candidate = made.candidate(meshpar.layouts.parse(case.layout))
        return Row(compiled, candidate, made.machine.devices[0].platform)

    def candidates(self, case: Case) -> Candidates:
        """Predicts the layouts of a program's model on its machine."""
        key = case.recipe, case.batch_size, case.topology
        if key not in self._made:
            config, devices = case.config, mesh.topology(case.topology)
            model = config.make_model()
            facts = Facts(
                model,
                optimizers.make_optimizer(config.optimizer, config.steps, model),
                config.abstract_batch(),
                programs.compute_dtype(config),
                devices,
            )
            self._made[key] = Candidates(facts, machine_of(devices))
        return self._made[key]
