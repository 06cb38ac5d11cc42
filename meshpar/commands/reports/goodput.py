"""Goodput of a run as a table, a picture and JSON: where its time went, by start."""

import datetime
from typing import Any

import matplotlib
import matplotlib.figure
import matplotlib.patches
import rich.box
import rich.table

from meshpar.commands.reports import terminal
from meshpar.runs import goodput
from meshpar.runs.time_record import (
    CHECKPOINTS,
    DOWN,
    END,
    EVALUATION,
    RESTORE,
    START,
    STEPS,
)

COLORS = {
    STEPS: "#2e8b57",
    goodput.LOST: "#d1495b",
    goodput.COMPILE: "#c2571a",
    START: "#1f6fb4",
    RESTORE: "#4aa3a2",
    CHECKPOINTS: "#8a63b5",
    EVALUATION: "#b8860b",
    END: "#8b949e",
    DOWN: "#d8dee4",
}
"""{use of time: its color}, the most useful first."""


def as_dict(found: goodput.Goodput) -> dict[str, Any]:
    """The goodput for programs, as JSON values."""
    return {
        "goodput": found.value,
        "wall_seconds": found.wall_seconds,
        "lost_steps": found.lost_steps,
        "seconds": found.seconds,
        "starts": [
            {
                **start.facts,
                "began": start.spans[0].begin if start.spans else None,
                "restored": start.restored,
                "last_step": start.last_step,
                "lost_steps": start.lost_steps,
                "ended": start.ended,
                "seconds": start.seconds,
            }
            for start in found.starts
        ],
    }


def _steps(start: goodput.Start) -> str:
    """The steps of a start in words."""
    if not start.num_steps:
        return "none"
    first = (start.restored or 0) + 1
    lost = f", {start.lost_steps} lost" if start.lost_steps else ""
    return f"{first} to {start.last_step}{lost}"


def print_table(found: goodput.Goodput) -> None:
    """Prints the seconds of every start by use, their sums, and the goodput."""
    uses = [use for use in COLORS if found.seconds[use]]
    whole = [rich.table.Column(use, no_wrap=True) for use in ("began", *uses, "ended")]
    layout = rich.table.Column("layout", overflow="fold")
    columns = whole[0], layout, "processes", "done", *whole[1:]
    table = rich.table.Table(*columns, title="seconds", box=rich.box.SIMPLE)
    for start in found.starts:
        began = start.spans[0].begin if start.spans else 0.0
        last = start is found.starts[-1]
        table.add_row(
            f"{datetime.datetime.fromtimestamp(began):%b %d %H:%M:%S}",
            str(start.facts.get("layout", "?")),
            str(start.facts.get("processes", "?")),
            _steps(start),
            *(f"{start.seconds[use]:.1f}" for use in uses),
            start.ended or ("killed, or goes on" if last else "killed"),
        )
    sums = (f"{found.seconds[use]:.1f}" for use in uses)
    table.add_row("all", "", "", "", *sums, "", style="bold")
    console = terminal.wide_console()
    console.print(table)
    console.print(str(found), soft_wrap=True)


# Layouts hold regexes: their dollar signs are no formulas.
@matplotlib.rc_context({"text.parse_math": False})
def figure(found: goodput.Goodput) -> matplotlib.figure.Figure:
    """Draws what every start did when, over the minutes since the first one.

    Compilation is drawn at the beginning of the part of the run that it belongs to.
    """
    size = 10, 1.4 + 0.35 * len(found.starts)
    drawing = matplotlib.figure.Figure(figsize=size, layout="constrained")
    axes = drawing.add_subplot()
    first = min((s.spans[0].begin for s in found.starts if s.spans), default=0.0)
    for row, start in enumerate(found.starts):
        for use, color in COLORS.items():
            bars = [
                ((span.begin - first) / 60, (span.end - span.begin) / 60)
                for span in start.spans
                if span.use == use
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color)
    names = [f"{i}: {s.facts.get('layout', '?')}" for i, s in enumerate(found.starts)]
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("minutes since the first start")
    handles = [
        matplotlib.patches.Patch(color=color, label=use)
        for use, color in COLORS.items()
        if found.seconds[use]
    ]
    drawing.legend(handles=handles, ncols=5, fontsize=8, loc="outside upper left")
    drawing.suptitle(f"goodput {found.value:.1%}", fontsize=9, x=0.95, ha="right")
    return drawing
