"""Fits the planner's time on GPUs to measured steps, and predicts each from the others.

    python -m experiments.benchmarks.gpu_fit

Takes the steps of `measured_gpus.json`. Finds the share of the peak that matmuls reach
on each card, the share that cuDNN's attention reaches for each width of a head, and the
factors of bytes that steps on one GPU show (`meshpar.planner.seconds.Factors`). They go
into `meshpar/mesh/machine.py` and `meshpar/planner/seconds.py` by hand. Then it leaves
each step out in turn, fits the others, and predicts the one that is left out. Needs the
GPU compiler, and no GPU: `pip install -e ".[aot-gpu]"`.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import rich.table

import meshpar
from experiments.benchmarks import fitting
from experiments.benchmarks.gpu_cases import Case
from meshpar import mesh
from meshpar.commands import command_line
from meshpar.commands.reports import terminal
from meshpar.mesh.machine import ATTENTION, Attention, Machine, machine_of
from meshpar.planner import seconds
from meshpar.planner.candidate import Candidate, Candidates
from meshpar.planner.facts import Facts
from meshpar.planner.seconds import Factors
from meshpar.runs import programs

FILE = pathlib.Path(__file__).with_name("measured_gpus.json")

_ROUNDS = 5
"""Of the fit: times of matmuls and of attention are not linear in their rates."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A step that was measured on a card.

    Attributes:
      card: name of its chip.
      case: what was trained.
      ms: milliseconds of a step.
      gb: memory at the peak, in GB.
      jax: version of jax.
      attention_ms: milliseconds of them in kernels of attention, where a profile says.
    """

    card: str
    case: Case
    ms: float
    gb: float
    jax: str
    attention_ms: float | None = None

    def candidates(self) -> Candidates:
        """Predicts layouts of the case on the card."""
        config, run = self.case.config(rehearsal=False).prepared()
        batch = run.data.abstract_batch(self.case.rows)
        dtype, devices = programs.compute_dtype(config), mesh.topology(f"{self.card}:1")
        facts = Facts(run.model, run.optimizer, batch, dtype, devices)
        return Candidates(facts, machine_of(devices))

    def predicted(self) -> Candidate:
        """The prediction of the planner."""
        return self.candidates().candidate(meshpar.layouts.parse(self.case.layout))


def read() -> list[Measured]:
    """The steps that were measured so far."""
    entries = json.loads(FILE.read_text())
    return [Measured(**{**x, "case": Case(**x["case"])}) for x in entries]


class Rates(NamedTuple):
    """Numbers of the planner that steps on one GPU show.

    Attributes:
      h200: share of the peak FLOP/s that matmuls reach on an H200.
      h100: the same on an H100.
      narrow: `Attention.narrow`.
      wide: `Attention.wide`.
      edge: `Attention.edge`.
      held: `Factors.held`.
      saved: `Factors.saved`.
    """

    h200: float
    h100: float
    narrow: float
    wide: float
    edge: float
    held: float
    saved: float

    @classmethod
    def in_use(cls, machines: dict[str, Machine]) -> Self:
        """The numbers that the planner has.

        Args:
          machines: by the names of their chips.
        """
        matmuls = (machines[name].efficiency for name in ("h200", "h100"))
        factors = seconds.ON_GPUS
        return cls(*matmuls, *ATTENTION, factors.held, factors.saved)

    @property
    def factors(self) -> Factors:
        """The factors of GPUs with these numbers."""
        return seconds.ON_GPUS._replace(held=self.held, saved=self.saved)

    def machine(self, like: Machine) -> Machine:
        """A machine with these numbers."""
        return dataclasses.replace(
            like,
            efficiency=getattr(self, like.chip.name),
            attention=Attention(self.narrow, self.wide, self.edge),
        )

    def describe(self) -> str:
        """The numbers in words."""
        return ", ".join(f"{name} {x:.3f}" for name, x in self._asdict().items())


class Fit:
    """Predicts measured steps with any numbers.

    Args:
      rows: the steps.
    """

    def __init__(self, rows: Sequence[Measured]):
        self.rows = rows
        self._made = [row.candidates() for row in rows]
        self._layouts = [meshpar.layouts.parse(row.case.layout) for row in rows]
        machines = {made.machine.chip.name: made.machine for made in self._made}
        self.start = np.array(Rates.in_use(machines))

    def times(self, rates: np.ndarray) -> np.ndarray:
        """Predicted milliseconds [rows, 2] of steps, and in kernels of attention.

        Args:
          rates: numbers to predict with [len(Rates._fields)].
        """
        own, found, in_use = Rates(*rates), [], seconds.ON_GPUS
        try:
            seconds.ON_GPUS = own.factors
            for made, layout in zip(self._made, self._layouts, strict=True):
                made.machine = own.machine(made.machine)
                terms = made.candidate(layout).seconds
                found.append([1e3 * terms.total, 1e3 * terms.kernels])
        finally:
            seconds.ON_GPUS = in_use
        return np.array(found)

    def fitted(self, rows: Sequence[int]) -> np.ndarray:
        """The numbers that fit some of the steps best.

        Args:
          rows: their indices.
        """
        measured = np.array([[x.ms, x.attention_ms or np.nan] for x in self.rows])[rows]
        known = ~np.isnan(measured)
        return fitting.fitted(
            lambda rates: self.times(rates)[rows][known],
            self.start,
            measured[known],
            rounds=_ROUNDS,
        )

    def left_out(self) -> np.ndarray:
        """Predicted milliseconds [rows] of each step by a fit to all others."""
        found, every = [], range(len(self.rows))
        for row in every:
            others = [other for other in every if other != row]
            found.append(self.times(self.fitted(others))[row, 0])
        return np.array(found)


def main(_: Sequence[str]) -> int:
    """Prints the numbers that fit best, and how well steps that are left out fit."""
    command_line.use_cpu()
    meshpar.simulate(1)
    rows, console = read(), terminal.plain_console()
    fit, measured = Fit(rows), np.array([row.ms for row in rows])
    fitted = fit.fitted(range(len(rows)))
    for name, rates in (("in use", fit.start), ("fitted", fitted)):
        errors = fitting.summary(fit.times(rates)[:, 0], measured)
        console.print(f"{name}: {errors}; {Rates(*rates).describe()}")
    in_use, left_out = fit.times(fit.start)[:, 0], fit.left_out()
    console.print(f"left out: {fitting.summary(left_out, measured)}")
    found = rich.table.Table("card", "case", "ms", "predicted", "left out")
    for row, used, alone in zip(rows, in_use, left_out, strict=True):
        errors = (f"{x / row.ms - 1:+.1%}" for x in (used, alone))
        found.add_row(row.card, row.case.describe(), f"{row.ms:.1f}", *errors)
    console.print(found)
    return 0


if __name__ == "__main__":
    command_line.run(main)
