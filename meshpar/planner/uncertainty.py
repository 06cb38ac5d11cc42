"""Errors of predictions, measured on compiled programs.

The ranges hold for kinds of layouts, and are those of the programs in
docs/measured_plans.md, which `experiments.benchmarks.predictions` prints.
"""

import dataclasses
from typing import NamedTuple

from meshpar.layouts.axes import PIPE, TENSOR
from meshpar.layouts.layout import Layout
from meshpar.mesh.chips import GPU, TPU
from meshpar.mesh.machine import Machine


class ErrorRange(NamedTuple):
    """The least and the greatest ratio of measured to predicted."""

    low: float
    high: float

    def __str__(self):
        return f"{self.low - 1:+.0%} to {self.high - 1:+.0%}"


@dataclasses.dataclass(frozen=True)
class Uncertainty:
    """Ratios of measured to predicted, for one kind of layouts.

    Attributes:
      memory: peak of the compiled program.
      seconds: estimate of the compiler's schedule; None where it states none.
    """

    memory: ErrorRange
    seconds: ErrorRange | None


OTHERS = "others"
"""Kind of layouts without the axes that make kinds of their own."""


def kind_of(layout: Layout) -> str:
    """The kind of a layout; predictions of one kind have similar errors."""
    if layout.pipe > 1:
        return PIPE
    return TENSOR if layout.tensor > 1 else OTHERS


MEASURED: dict[tuple[str, str], Uncertainty] = {
    (TPU, OTHERS): Uncertainty(ErrorRange(0.96, 1.04), ErrorRange(0.84, 1.12)),
    (TPU, TENSOR): Uncertainty(ErrorRange(0.91, 1.03), ErrorRange(0.90, 1.15)),
    (TPU, PIPE): Uncertainty(ErrorRange(0.91, 1.02), ErrorRange(0.91, 1.91)),
    (GPU, OTHERS): Uncertainty(ErrorRange(0.99, 1.01), None),
    (GPU, TENSOR): Uncertainty(ErrorRange(1.02, 1.03), None),
}
"""{(platform, kind of layouts): found over predicted}."""


def uncertainty_of(layout: Layout, machine: Machine) -> Uncertainty | None:
    """The errors of predictions for a layout's kind; None if none were measured."""
    return MEASURED.get((machine.chip.platform, kind_of(layout)))
