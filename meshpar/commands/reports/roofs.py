"""Training steps of several batch sizes under the roofline of a chip."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import matplotlib.figure
import matplotlib.ticker
import numpy as np
import rich.table

from meshpar.commands.reports.pictures import with_look
from meshpar.contracts.hlo_work import Work
from meshpar.explain import roofline
from meshpar.mesh.chips import Chip
from meshpar.units import readable_bytes, readable_seconds

TITLES = "rows", "FLOPs", "moved", "FLOPs/byte", "at most of the peak", "at least"


@dataclasses.dataclass(frozen=True)
class Steps:
    """The work of a device in steps of several batch sizes.

    Attributes:
      chip: of the device.
      works: {rows of the batch: work}, compiled, with few rows first.
    """

    chip: Chip
    works: Mapping[int, Work]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """A row of `TITLES` for each batch size."""
        return [
            (
                str(rows),
                f"{work.flops:.3g}",
                readable_bytes(work.moved),
                f"{work.intensity:.1f}",
                f"{roofline.share_of_peak(self.chip, work.intensity):.0%}",
                readable_seconds(roofline.seconds(work, self.chip)),
            )
            for rows, work in self.works.items()
        ]

    def as_dict(self) -> dict[str, Any]:
        """The steps as plain values, for JSON: FLOPs and bytes by rows."""
        works = {rows: work._asdict() for rows, work in self.works.items()}
        return {"chip": self.chip.name, "rows": works, "words": self.words}

    @property
    def words(self) -> str:
        """The ridge of the chip, and the rows at which the step crosses it."""
        ridge = roofline.ridge(self.chip)
        crossing = roofline.fit(self.works).rows_at(ridge)
        found = np.isfinite(crossing)
        where = f"from {crossing:,.0f} rows on" if found else "at no number of rows"
        return (
            f"{self.chip.name} computes at its peak from {ridge:.0f} FLOPs per byte "
            "on. By the line through the smallest and the largest batch, the step gets "
            f"there {where}"
        )


def table(steps: Steps) -> rich.table.Table:
    """A table for the terminal."""
    found = rich.table.Table(*TITLES, title="roofline of a device", caption=steps.words)
    for row in steps.rows:
        found.add_row(*row)
    return found


@with_look
def figure(steps: Steps) -> matplotlib.figure.Figure:
    """The roof of the chip with a point for each batch; intensity over the batch."""
    drawn = matplotlib.figure.Figure(figsize=(8, 3.2), layout="constrained")
    left, right = drawn.subplots(1, 2)
    ridge, found = roofline.ridge(steps.chip), list(steps.works.items())
    found_x = [work.intensity for _, work in found]
    ends = min(*found_x, ridge) / 4, max(*found_x, ridge) * 4
    x = np.geomspace(*ends, 100)
    peak = steps.chip.peak_flops / 1e12
    roof = [peak * roofline.share_of_peak(steps.chip, value) for value in x]
    left.plot(x, roof, color="#1f6fb4")
    for index, (rows, work) in enumerate(found):
        y = peak * roofline.share_of_peak(steps.chip, work.intensity)
        left.plot(work.intensity, y, "o", color="#c2571a")
        # On both sides in turn, as large batches lie close together.
        offset, side = ((5, -8), "left") if index % 2 else ((-5, 3), "right")
        place = dict(xytext=offset, textcoords="offset points", ha=side)
        left.annotate(str(rows), (work.intensity, y), **place)
    left.set(xscale="log", yscale="log", xlabel="FLOPs per byte")
    left.xaxis.set_major_formatter("{x:g}")
    left.yaxis.set_major_formatter("{x:g}")
    left.set_ylabel(f"TFLOP/s of {steps.chip.name} at most")
    line = roofline.fit(steps.works)
    rows = np.geomspace(found[0][0], found[-1][0], 60)
    right.plot(rows, [line.work(n).intensity for n in rows], color="#8b949e")
    right.plot([n for n, _ in found], found_x, "o", color="#c2571a")
    right.axhline(ridge, color="#1f6fb4", linestyle=":")
    right.text(found[0][0], ridge, "ridge", va="bottom")
    right.set(xscale="log", xlabel="rows of a batch", ylabel="FLOPs per byte", ylim=0)
    right.set_xticks(list(steps.works), labels=map(str, steps.works))
    for axis in (left.xaxis, left.yaxis, right.xaxis):
        axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    return drawn
