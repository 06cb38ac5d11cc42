"""Roofline: FLOPs per byte of memory, and the batch from which a chip computes at peak.

A program of F FLOPs that moves B bytes between a chip and its memory takes at least
max(F / peak, B / bandwidth). Its arithmetic intensity is F / B. Where that is below the
chip's ridge, peak / bandwidth, memory decides. More rows in a batch read the weights
once for more FLOPs, so intensity grows with the batch.

Source: Williams, Waterman, Patterson, Roofline: an insightful visual performance model
  for multicore architectures, Communications of the ACM 52(4), 2009; Austin et al., How
  To Scale Your Model, 2025, section "Rooflines".
"""

import dataclasses
import math

from meshpar.contracts.hlo_work import Work
from meshpar.errors import MeshparError
from meshpar.mesh.chips import Chip


def seconds(work: Work, chip: Chip) -> float:
    """The least time that a chip takes, if it moves bytes while it computes."""
    return max(work.flops / chip.peak_flops, work.moved / chip.memory_bandwidth)


def ridge(chip: Chip) -> float:
    """FLOPs per byte from which a chip can compute at its peak."""
    return chip.peak_flops / chip.memory_bandwidth


def share_of_peak(chip: Chip, intensity: float) -> float:
    """The largest share of a chip's peak that an intensity allows."""
    return min(1.0, intensity / ridge(chip))


def matmul(rows: float, num_in: int, num_out: int, width: int = 2) -> Work:
    """The work of x[rows, in] w[in, out] if every number is moved once.

    Args:
      rows: of x.
      num_in: rows of w.
      num_out: columns of w.
      width: bytes of a number.
    """
    numbers = rows * num_in + num_in * num_out + rows * num_out
    return Work(2 * rows * num_in * num_out, width * numbers)


def matmul_rows(chip: Chip, num_in: int, num_out: int, width: int = 2) -> float:
    """Rows from which a matmul computes at a chip's peak; infinite if it never does.

    2 R M N = ridge * width * (R M + M N + R N), solved for R: a little more than the
    ridge for numbers of 2 bytes and a large weight.
    """
    per_byte = ridge(chip) * width
    spare = 2 * num_in * num_out - per_byte * (num_in + num_out)
    return per_byte * num_in * num_out / spare if spare > 0 else math.inf


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step whose work grows linearly with the rows of its batch.

    Attributes:
      fixed: work that does not grow: weights that are read, and their update.
      per_row: what a row adds.
    """

    fixed: Work
    per_row: Work

    def work(self, rows: float) -> Work:
        """The work of a step."""
        return Work(
            self.fixed.flops + rows * self.per_row.flops,
            self.fixed.moved + rows * self.per_row.moved,
        )

    def rows_at(self, intensity: float) -> float:
        """Rows from which a step has an intensity; infinite if no number has it."""
        missing = intensity * self.fixed.moved - self.fixed.flops
        gained = self.per_row.flops - intensity * self.per_row.moved
        return max(0.0, missing / gained) if gained > 0 else math.inf


def fit(works: dict[float, Work]) -> Step:
    """The line through the works of the smallest and the largest batch.

    Args:
      works: {rows: work of a step}.

    Raises:
      MeshparError: works of less than two batch sizes.
    """
    if len(works) < 2:
        raise MeshparError(f"works of {len(works)} batch sizes: give 2 or more")
    low, high = min(works), max(works)
    slope = Work(
        (works[high].flops - works[low].flops) / (high - low),
        (works[high].moved - works[low].moved) / (high - low),
    )
    start = works[low]
    fixed = Work(start.flops - low * slope.flops, start.moved - low * slope.moved)
    return Step(fixed, slope)
