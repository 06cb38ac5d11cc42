"""Fits the planner's factors to the times that compilers state.

    python -m experiments.benchmarks.planner_fit --draws=3

Takes the programs for TPUs of `compiled_programs.json`, and those of
`drawn_programs.json` with seeds from 1 to --draws. Finds the factors
(`meshpar.planner.seconds.Factors`) that predict the stated times best, by least squares
of the logarithms of ratios. Prints the mean errors with the factors in use and with the
new ones, which go into `FACTORS` of that file by hand. Programs with experts count only
where jax 0.12 or newer compiled them: older compilers state cycles for grouped matmuls.
Takes ten minutes.
"""

from collections.abc import Sequence

import numpy as np
from absl import flags

import meshpar
from experiments.benchmarks import compiled_programs, drawn_programs, fitting
from experiments.benchmarks.compiled_programs import Compiled
from experiments.benchmarks.drawn_programs import DRAWS
from experiments.benchmarks.predictor import Predictor
from meshpar.commands import command_line
from meshpar.planner import seconds
from meshpar.planner.seconds import Factors

flags.declare_key_flag(DRAWS.name)

_KEPT = ("state_moves",)
"""Factors that are not fitted. Programs with experts would raise this one, and dense
programs under fsdp would then be predicted a fifth too slow."""

_MOST = 50.0
"""The largest factor that is tried."""


def programs(last: int, predictor: Predictor) -> list[Compiled]:
    """The programs to fit, of which the compiler states the time of all but kernels.

    Args:
      last: seed of draws to fit; later ones are left to judge the fit.
      predictor: of programs.
    """

    def is_stated(compiled: Compiled) -> bool:
        if compiled.seconds is None:
            return False
        is_old = tuple(map(int, compiled.jax_line.split("."))) < (0, 12)
        facts = predictor.candidates(compiled.case).facts
        return not (is_old and facts.flops.grouped)

    drawn = (row.compiled for row in drawn_programs.read() if row.seed <= last)
    return list(filter(is_stated, (*drawn, *compiled_programs.read())))


def times(
    factors: Factors, predictor: Predictor, found: Sequence[Compiled]
) -> np.ndarray:
    """Predicted times of all but kernels [programs]."""
    seconds.FACTORS = factors
    return np.array([predictor.row(compiled).seconds for compiled in found])


def fitted(start: Factors, predictor: Predictor, found: Sequence[Compiled]) -> Factors:
    """The factors that fit best, with times that are linear in the factors."""
    is_free = np.array([name not in _KEPT for name in Factors._fields])

    def seconds_of(free: np.ndarray) -> np.ndarray:
        every = np.array(start)
        every[is_free] = free
        return times(Factors(*every), predictor, found)

    factors = np.array(start)
    stated = np.array([compiled.seconds for compiled in found])
    factors[is_free] = fitting.fitted(seconds_of, factors[is_free], stated, _MOST)
    return Factors(*(round(float(x), 2) for x in factors))


def main(_: Sequence[str]) -> int:
    """Prints the factors that fit best."""
    command_line.use_cpu()
    meshpar.simulate(1)
    predictor = Predictor()
    found = programs(DRAWS.value, predictor)
    start = seconds.FACTORS
    new = fitted(start, predictor, found)
    stated = np.array([compiled.seconds for compiled in found])
    for name, factors in (("in use", start), ("fitted", new)):
        predicted = times(factors, predictor, found)
        print(f"{name}: {fitting.summary(predicted, stated)}, {factors}")
    return 0


if __name__ == "__main__":
    command_line.run(main)
