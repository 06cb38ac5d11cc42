"""A pipeline schedule compiled to int32 tables [tick, stage] that one program can scan.

Buffers hold values between ticks: activations and gradients that have arrived, values
that F saves for B, and values that B saves for W. The slots of a buffer come from
coloring the intervals in which they are taken, so buffers are as small as the schedule
allows. Pure numpy: no jax.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from meshpar.schedules.table import Op, Schedule


class Columns(NamedTuple):
    """Operations and buffer slots of every stage in every tick; int32 [ticks, stages].

    Attributes:
      f_on: whether F runs.
      f_microbatch: microbatch of F.
      f_chunk: chunk of F.
      f_input: slot of F's input among the arrived activations.
      f_saved: slot of the values that F saves for B.
      first: whether F reads the embedding instead of `f_input`.
      last: whether the head follows F.
      head_gradient: slot among the gradients for the head's gradient.
      arrived: slot for the activation that arrives from the stage before at the end of
        the tick.
      arrived_back: slot for the one that arrives from the stage after, where chunks go
        back.
      kept: slot for F's output, where the stage itself has the next chunk.
      gradient_arrived: slot for the gradient that arrives from the stage after at the
        start of the tick.
      gradient_back: slot for the one that arrives from the stage before.
      gradient_kept: slot for the gradient of the last B, where the stage itself has the
        chunk before.
      b_on: whether B runs.
      b_microbatch: microbatch of B.
      b_chunk: chunk of B.
      b_gradient: slot of the gradient that B reads.
      b_saved: slot of the values that F saved.
      b_first: whether the embedding's gradient follows B.
      b_state: slot of the values that B saves for W.
      w_on: whether W runs.
      w_chunk: chunk of W.
      w_state: slot of the values that B saved.
    """

    f_on: np.ndarray
    f_microbatch: np.ndarray
    f_chunk: np.ndarray
    f_input: np.ndarray
    f_saved: np.ndarray
    first: np.ndarray
    last: np.ndarray
    head_gradient: np.ndarray
    arrived: np.ndarray
    arrived_back: np.ndarray
    kept: np.ndarray
    gradient_arrived: np.ndarray
    gradient_back: np.ndarray
    gradient_kept: np.ndarray
    b_on: np.ndarray
    b_microbatch: np.ndarray
    b_chunk: np.ndarray
    b_gradient: np.ndarray
    b_saved: np.ndarray
    b_first: np.ndarray
    b_state: np.ndarray
    w_on: np.ndarray
    w_chunk: np.ndarray
    w_state: np.ndarray


ARRIVALS = {1: "arrived", -1: "arrived_back", 0: "kept"}
"""{step from the sender to the receiver: column} of activations."""

GRADIENT_ARRIVALS = {-1: "gradient_arrived", 1: "gradient_back", 0: "gradient_kept"}
"""{step from the sender to the receiver: column} of gradients."""


class Phase(NamedTuple):
    """Consecutive ticks in which the same operations run on any of the stages.

    Attributes:
      start: first tick.
      stop: tick after the last one.
      forward: whether F runs.
      backward: whether B runs.
      weight: whether W runs.
      head: whether the head runs; None if it runs in some of the ticks only.
    """

    start: int
    stop: int
    forward: bool
    backward: bool
    weight: bool
    head: bool | None


@dataclasses.dataclass(frozen=True)
class Tables:
    """A compiled schedule.

    Attributes:
      columns: operations and slots of every stage in every tick.
      phases: all ticks in order, cut where the running operations change.
      num_inputs: slots for activations that have arrived.
      num_saved: slots for values that F saves for B.
      num_gradients: slots for gradients that have arrived.
      num_states: slots for values that B saves for W.
      diverges: whether stages run different operations in one tick.
    """

    columns: Columns
    phases: tuple[Phase, ...]
    num_inputs: int
    num_saved: int
    num_gradients: int
    num_states: int
    diverges: bool


Interval = tuple[int, int, Op]
"""(first tick, last tick, operation) of a value that waits in a buffer."""


def _intervals(s: Schedule) -> dict[str, list[list[Interval]]]:
    """{buffer: intervals by stage} of every value that waits."""
    intervals: dict[str, list[list[Interval]]] = {
        buffer: [[] for _ in range(s.num_stages)]
        for buffer in ("inputs", "saved", "gradients", "states")
    }
    for op in s.ops():
        f, b, stage = s.forward[op], s.backward[op], op.stage
        intervals["saved"][stage].append((f, b, op))
        if before := s.before(op):
            intervals["inputs"][stage].append((s.forward[before] + 1, f, op))
        after = s.after(op)
        arrival = s.backward[after] + 1 if after else f
        intervals["gradients"][stage].append((arrival, b, op))
        if s.weight:
            intervals["states"][stage].append((b, s.weight[op], op))
    return intervals


def _colored(intervals: Iterable[Interval]) -> tuple[dict[Op, int], int]:
    """The slot of each interval, and the number of slots, as few as possible."""
    slots: dict[Op, int] = {}
    busy: list[tuple[int, int]] = []  # (last tick, slot), a heap like the next one.
    free: list[int] = []
    count = 0
    for start, end, op in sorted(intervals):
        while busy and busy[0][0] < start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slot = heapq.heappop(free) if free else count
        count = max(count, slot + 1)
        heapq.heappush(busy, (end, slot))
        slots[op] = slot
    return slots, count


def compile_schedule(schedule: Schedule) -> Tables:
    """Compiles a schedule that passes `check.problems` to tables.

    A slot equal to the number of slots means "nowhere": the executor writes values that
    nothing reads to that extra slot.
    """
    s = schedule
    slots, counts = {}, {}
    for buffer, stages in _intervals(s).items():
        colored = [_colored(intervals) for intervals in stages]
        slots[buffer] = {op: slot for by_op, _ in colored for op, slot in by_op.items()}
        counts[buffer] = max(count for _, count in colored)

    shape = s.num_ticks, s.num_stages
    nowhere = {
        "f_saved": counts["saved"],
        "head_gradient": counts["gradients"],
        **dict.fromkeys(ARRIVALS.values(), counts["inputs"]),
        **dict.fromkeys(GRADIENT_ARRIVALS.values(), counts["gradients"]),
        "b_state": counts["states"],
    }
    columns = Columns(
        **{
            name: np.full(shape, nowhere.get(name, 0), np.int32)
            for name in Columns._fields
        }
    )
    for op in s.ops():
        _fill(columns, s, op, slots)
    return Tables(
        columns,
        tuple(_phases(columns)),
        counts["inputs"],
        counts["saved"],
        counts["gradients"],
        counts["states"],
        s.diverges,
    )


def _step(s: Schedule, sender: Op, receiver: Op) -> int:
    """Stages from a sender to a receiver, around a ring if the schedule is no V."""
    step = receiver.stage - sender.stage
    wraps = sender.chunk != receiver.chunk and not s.folded
    return step if not wraps else (1 if receiver.chunk > sender.chunk else -1)


def _fill(columns: Columns, s: Schedule, op: Op, slots: dict) -> None:
    """Writes one operation into the tables."""
    at = s.forward[op], op.stage  # Row and column of F.
    columns.f_on[at] = 1
    columns.f_microbatch[at], columns.f_chunk[at] = op.microbatch, op.chunk
    columns.f_saved[at] = slots["saved"][op]
    if before := s.before(op):
        columns.f_input[at] = slots["inputs"][op]
        arrivals = getattr(columns, ARRIVALS[_step(s, before, op)])
        arrivals[s.forward[before], op.stage] = slots["inputs"][op]
    else:
        columns.first[at] = 1
    if after := s.after(op):
        arrivals = getattr(columns, GRADIENT_ARRIVALS[_step(s, after, op)])
        arrivals[s.backward[after] + 1, op.stage] = slots["gradients"][op]
    else:
        columns.last[at] = 1
        columns.head_gradient[at] = slots["gradients"][op]
    at = s.backward[op], op.stage
    columns.b_on[at] = 1
    columns.b_microbatch[at], columns.b_chunk[at] = op.microbatch, op.chunk
    columns.b_gradient[at] = slots["gradients"][op]
    columns.b_saved[at] = slots["saved"][op]
    columns.b_first[at] = s.before(op) is None
    if s.weight:
        columns.b_state[at] = slots["states"][op]
        at = s.weight[op], op.stage
        columns.w_on[at] = 1
        columns.w_chunk[at], columns.w_state[at] = op.chunk, slots["states"][op]


_MOST_HEAD_PHASES = 2
"""Phases into which a run of ticks may be cut so that the head runs in all or none.

Where W is split off, no run is cut so that a single tick is left. No loop is around
such a phase, and its collectives could run among those of the phase before.
"""


def _phases(columns: Columns) -> Iterator[Phase]:
    """Runs of ticks with the same operations, cut at the head if that makes few."""
    used = [column.any(axis=1) for column in (columns.f_on, columns.b_on, columns.w_on)]
    kinds = list(zip(*(column.tolist() for column in used), strict=True))
    head, splits_weights = columns.last.any(axis=1).tolist(), columns.w_on.any()
    start = 0
    for kind, ticks in itertools.groupby(kinds):
        stop = start + len(list(ticks))
        runs = [(on, len(list(run))) for on, run in itertools.groupby(head[start:stop])]
        most = _MOST_HEAD_PHASES
        if splits_weights and any(length == 1 for _, length in runs):
            most = 1
        if len(runs) > most:
            yield Phase(start, stop, *kind, None)
        else:
            for on, length in runs:
                yield Phase(start, start + length, *kind, on)
                start += length
        start = stop
