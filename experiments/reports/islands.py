"""Results of islands: tables and curves."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import matplotlib
import rich.table

matplotlib.use("Agg")
from matplotlib import figure


class Result(NamedTuple):
    """One case of the sweep.

    Attributes:
      case: the consistency model.
      stragglers: kind of stragglers.
      waiting: share of the workers' time that they waited for pulls.
      curve: [(seconds, bytes, pushes, held-out loss)].
      spans: what every worker did.
    """

    case: str
    stragglers: str
    waiting: float
    curve: Sequence[tuple[float, int, int, float]]
    spans: Sequence[Sequence[Any]]

    def seconds_to(self, target: float) -> float | None:
        """Simulated seconds until the loss is at a target; None if it never is."""
        return next((row[0] for row in self.curve if row[3] <= target), None)

    def loss_after(self, pushes: int) -> float:
        """The loss after so many pushes, or the last one."""
        late = (row[3] for row in self.curve if row[2] >= pushes)
        return next(late, self.curve[-1][3])


def target(results: Iterable[Result], stragglers: str) -> float:
    """The loss that BSP has after two thirds of the time."""
    bsp = next(r for r in results if (r.case, r.stragglers) == ("BSP", stragglers))
    return bsp.curve[len(bsp.curve) * 2 // 3][3]


def table(results: Sequence[Result], stragglers: str) -> rich.table.Table:
    """The cases with one kind of stragglers."""
    mine = [result for result in results if result.stragglers == stragglers]
    goal, fewest = target(mine, stragglers), min(r.curve[-1][2] for r in mine)
    found = rich.table.Table(
        *("case", "pushes", "waiting", "loss", f"loss after {fewest} pushes"),
        *(f"seconds to {goal:.3f}", "MB"),
        title=f"stragglers: {stragglers}",
    )
    for result in mine:
        _, num_bytes, pushes, loss = result.curve[-1]
        seconds = result.seconds_to(goal)
        found.add_row(
            *(result.case, f"{pushes:,}", f"{100 * result.waiting:.1f}%"),
            *(f"{loss:.4f}", f"{result.loss_after(fewest):.4f}"),
            *(f"{seconds:.1f}" if seconds is not None else "-",),
            f"{num_bytes / 1e6:.1f}",
        )
    return found


def curves(results: Sequence[Result]) -> figure.Figure:
    """Loss over time and over bytes, and waiting, per kind of straggler."""
    kinds = list(dict.fromkeys(result.stragglers for result in results))
    drawing = figure.Figure(figsize=(13, 3.6 * len(kinds)), layout="constrained")
    grid = drawing.subplots(len(kinds), 3, squeeze=False)
    for kind, (time, bytes_, wait) in zip(kinds, grid, strict=True):
        mine = [result for result in results if result.stragglers == kind]
        for number, result in enumerate(mine):
            seconds, num_bytes, _, losses = zip(*result.curve, strict=True)
            time.plot(seconds, losses, label=result.case)
            bytes_.plot([b / 1e6 for b in num_bytes], losses)
            wait.bar(number, 100 * result.waiting)
        time.set(xlabel="simulated seconds", ylabel="held-out loss, nats")
        time.set_title(f"stragglers: {kind}", fontsize=10)
        bytes_.set(xlabel="MB moved", ylabel="held-out loss, nats")
        wait.set(ylabel="share of time waiting, %")
        names = [result.case.replace(", ", ",\n") for result in mine]
        wait.set_xticks(range(len(mine)), names, fontsize=7)
        time.legend(fontsize=7)
    return drawing
