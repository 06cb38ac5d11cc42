"""Time lines of islands: when every worker computed, waited and pushed."""

from collections.abc import Sequence
from typing import Any

from matplotlib import figure, patches

COLORS = {"compute": "#2e8b57", "wait": "#c2571a", "push": "#1f6fb4"}
"""Colors of what a worker does."""


def time_lines(workers: Sequence[Sequence[Any]]) -> figure.Figure:
    """Draws when every worker computed, waited and pushed, over seconds.

    Args:
      workers: spans with `kind`, `start` and `stop` in seconds, of every worker.
    """
    drawing = figure.Figure(figsize=(10, 1.0 + 0.45 * len(workers)))
    axes = drawing.add_subplot()
    first = min((s.start for spans in workers for s in spans), default=0.0)
    for row, spans in enumerate(workers):
        for kind, color in COLORS.items():
            bars = [
                (s.start - first, s.stop - s.start) for s in spans if s.kind == kind
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color)
    axes.set_yticks(range(len(workers)), [f"island {i}" for i in range(len(workers))])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    handles = [patches.Patch(color=color, label=kind) for kind, color in COLORS.items()]
    axes.legend(handles=handles, fontsize=8, ncols=3, loc="lower right")
    return drawing
