"""Fits the planner's factors to the times that compilers state.

    python -m experiments.benchmarks.planner_fit --draws=3

Takes the programs for TPUs of `compiled_programs.json`, and those of
`drawn_programs.json` with seeds from 1 to --draws. Finds the factors
(`meshpar.planner.seconds.Factors`), and the prices of narrow matmuls and of elementwise
operations on each chip (`NARROW` and `ELEMENTWISE` of `meshpar.mesh.machine`), that
predict the stated times best, by least squares of the logarithms of ratios. Prints the
mean errors with the numbers in use and with the new ones, which go into `FACTORS`,
`NARROW` and `ELEMENTWISE` by hand. Programs with experts count only where jax 0.12 or
newer compiled them: older compilers state cycles for grouped matmuls. Takes fifteen
minutes.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import flags

import meshpar
from experiments.benchmarks import compiled_programs, drawn_programs, fitting
from experiments.benchmarks.compiled_programs import Compiled
from experiments.benchmarks.drawn_programs import DRAWS
from experiments.benchmarks.predictor import Predictor
from meshpar.commands import command_line
from meshpar.mesh import machine
from meshpar.planner import seconds
from meshpar.planner.seconds import Factors

flags.declare_key_flag(DRAWS.name)

_KEPT = ("state_moves",)
"""Factors that are not fitted. Programs with experts would raise this one, and dense
programs under fsdp would then be predicted a fifth too slow."""

_ROUNDS = 3
"""Of the fit: times are linear in all numbers but for a product of two."""

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


class Numbers(NamedTuple):
    """The numbers that a fit finds.

    Attributes:
      factors: of all chips.
      narrow: {chip: price of narrow matmuls}, as `machine.NARROW`.
      elementwise: {chip: price of elementwise operations}, as `machine.ELEMENTWISE`.
    """

    factors: Factors
    narrow: dict[str, float]
    elementwise: dict[str, float]

    def flat(self) -> np.ndarray:
        """All that may change, as an array."""
        free = [x for n, x in self.factors._asdict().items() if n not in _KEPT]
        return np.array([*free, *self.narrow.values(), *self.elementwise.values()])

    def changed(self, flat: Sequence[float] | np.ndarray) -> "Numbers":
        """These numbers, with the values of `flat`."""
        free, rest = [n for n in Factors._fields if n not in _KEPT], iter(flat)
        factors = self.factors._replace(**dict(zip(free, rest, strict=False)))
        of_chips = self.narrow, self.elementwise
        return Numbers(factors, *({c: next(rest) for c in own} for own in of_chips))


def times(
    numbers: Numbers, predictor: Predictor, found: Sequence[Compiled]
) -> np.ndarray:
    """Predicted times of all but kernels [programs]."""
    seconds.FACTORS = numbers.factors

    def predicted(compiled: Compiled) -> float:
        made = predictor.candidates(compiled.case)
        chip = made.machine.chip.name
        made.machine = dataclasses.replace(
            made.machine,
            narrow=numbers.narrow[chip],
            elementwise=numbers.elementwise.get(chip, 1.0),
        )
        return predictor.row(compiled).seconds

    return np.array([predicted(compiled) for compiled in found])


def fitted(start: Numbers, predictor: Predictor, found: Sequence[Compiled]) -> Numbers:
    """The numbers that fit best."""

    def seconds_of(flat: np.ndarray) -> np.ndarray:
        return times(start.changed(flat), predictor, found)

    stated = np.array([compiled.seconds for compiled in found])
    best = fitting.fitted(seconds_of, start.flat(), stated, _MOST, _ROUNDS)
    return start.changed(best.round(2).tolist())


def main(_: Sequence[str]) -> int:
    """Prints the numbers that fit best."""
    command_line.use_cpu()
    meshpar.simulate(1)
    predictor = Predictor()
    found = programs(DRAWS.value, predictor)
    start = Numbers(seconds.FACTORS, machine.NARROW, machine.ELEMENTWISE)
    new = fitted(start, predictor, found)
    stated = np.array([compiled.seconds for compiled in found])
    for name, numbers in (("in use", start), ("fitted", new)):
        predicted = times(numbers, predictor, found)
        print(f"{name}: {fitting.summary(predicted, stated)}, {numbers}")
    return 0


if __name__ == "__main__":
    command_line.run(main)
