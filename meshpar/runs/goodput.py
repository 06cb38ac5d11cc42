"""Goodput of a run: the share of its time that went into steps that count.

The time is that since the first start of the run, over all starts of its record
(`time_record`). A step counts unless a later start went on from before it: then it was
lost, and so was the one that a kill interrupted.
"""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from meshpar.runs import json_lines
from meshpar.runs.time_record import (
    CHECKPOINTS,
    DONE,
    DOWN,
    END,
    EVALUATION,
    FAILED,
    RECORD,
    RESTORE,
    START,
    STEPS,
)

COMPILE, LOST = "compile", "lost"
"""Uses of time that lie inside the parts of the record."""

USES = (
    *(START, COMPILE, RESTORE, STEPS, LOST),
    *(CHECKPOINTS, EVALUATION, END, DOWN),
)
"""All uses of the time of a run."""


class Span(NamedTuple):
    """A time in which a run did one thing.

    Attributes:
      use: one of `USES`.
      begin: in seconds since the epoch.
      end: as `begin`.
    """

    use: str
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a run, up to its last line, and the time down after it.

    Attributes:
      facts: what it ran, {"layout": ..., "processes": ...}.
      restored: the step from which it went on; None if it did not come so far.
      last_step: the last step that it finished.
      lost_steps: those of them that a later start did again, or would.
      ended: "done", "stopped", "failed"; "" if it was killed or goes on.
      spans: in order, without gaps.
    """

    facts: Mapping[str, Any]
    restored: int | None
    last_step: int
    lost_steps: int
    ended: str
    spans: tuple[Span, ...]

    @property
    def num_steps(self) -> int:
        """Number of steps that it finished, lost ones included."""
        return self.last_step - (self.restored or 0)

    @property
    def seconds(self) -> dict[str, float]:
        """{use: seconds} of all of `USES`."""
        totals = dict.fromkeys(USES, 0.0)
        for span in self.spans:
            totals[span.use] += span.end - span.begin
        return totals


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The time of a run.

    Attributes:
      starts: all of them, in order.
    """

    starts: tuple[Start, ...]

    @property
    def seconds(self) -> dict[str, float]:
        """{use: seconds} over all starts."""
        each = [start.seconds for start in self.starts]
        return {use: sum(seconds[use] for seconds in each) for use in USES}

    @property
    def wall_seconds(self) -> float:
        """Seconds since the first start, but for pauses after the last step."""
        return sum(self.seconds.values())

    @property
    def value(self) -> float:
        """Seconds of steps that count over all seconds; 0 without any."""
        return self.seconds[STEPS] / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def lost_steps(self) -> int:
        """Number of steps that were done, and done again."""
        return sum(start.lost_steps for start in self.starts)

    def __str__(self) -> str:
        rest = [
            f"{use} {seconds:.1f} s" for use, seconds in self.seconds.items() if seconds
        ]
        lost = f", {self.lost_steps} steps lost" if self.lost_steps else ""
        return (
            f"goodput {self.value:.1%} of {self.wall_seconds:.1f} s in "
            f"{len(self.starts)} start(s){lost}: {', '.join(rest)}"
        )


def read(folder: pathlib.Path) -> Goodput:
    """Reads the record in a run's folder; without one there are no starts."""
    lines: list[list[dict[str, Any]]] = []
    latest = -math.inf
    for row in json_lines.read(folder / RECORD):
        if not isinstance(row.get("time"), int | float):
            continue
        # A clock that was set back stands still until it has caught up.
        latest = row["time"] = max(latest, row["time"])
        if "start" in row:
            lines.append([])
        if lines:
            lines[-1].append(row)
    return Goodput(tuple(_starts(lines)))


def _starts(lines: Sequence[Sequence[dict[str, Any]]]) -> Iterator[Start]:
    """Makes every start of its lines, with what later starts say of it."""
    restored = [
        next((row["restored"] for row in rows if "restored" in row), None)
        for rows in lines
    ]
    for number, rows in enumerate(lines):
        later = [step for step in restored[number + 1 :] if step is not None]
        following = lines[number + 1][0]["time"] if number + 1 < len(lines) else None
        yield _start(rows, restored[number], min(later, default=None), following)


def _start(
    rows: Sequence[dict[str, Any]],
    restored: int | None,
    kept: int | None,
    following: float | None,
) -> Start:
    """Makes one start.

    Args:
      rows: its lines.
      restored: the step from which it went on.
      kept: the earliest step from which a later start went on; None without any.
      following: when the next start began; None if there is none.
    """
    ended, end = rows[-1].get("ended", ""), rows[-1]["time"]
    interrupted = ended == FAILED or (not ended and following is not None)
    horizon = math.inf if kept is None else kept
    marks = [row for row in rows if "part" in row and "ended" not in row]
    closing = {**rows[-1], "part": DOWN}
    done, spans = restored or 0, []
    for mark, after in itertools.pairwise([*marks, closing]):
        use = mark["part"]
        if use == STEPS:
            unfinished = interrupted and after["part"] in (END, DOWN)
            if after["part"] == STEPS:
                done = max(done, after["step"])
            use = LOST if done > horizon or unfinished else STEPS
        middle = min(mark["time"] + after.get("compiled", 0.0), after["time"])
        spans.append(Span(COMPILE, mark["time"], middle))
        spans.append(Span(use, middle, after["time"]))
    if following is not None and ended != DONE:
        spans.append(Span(DOWN, end, following))
    first = restored or 0
    lost = max(0, done - max(first, min(horizon, done)))
    return Start(rows[0]["start"], restored, done, lost, ended, tuple(_merged(spans)))


def _merged(spans: Sequence[Span]) -> Iterator[Span]:
    """Joins neighbours of one use, and leaves out empty spans."""
    full = (span for span in spans if span.end > span.begin)
    for use, group in itertools.groupby(full, lambda span: span.use):
        first, *rest = group
        yield Span(use, first.begin, (rest or [first])[-1].end)
