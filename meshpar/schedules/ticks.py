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

from meshpar.schedules.table import Schedule


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


class _Operations(NamedTuple):
    """The operations of a schedule, in the order of `Schedule.ops`; int32 arrays [N].

    Attributes:
      microbatch: of each one.
      chunk: of each one.
      stage: of each one.
      forward: tick of F.
      backward: tick of B.
      weight: tick of W; empty if the schedule does not split it off.
      before: number of the operation whose output F reads; -1 if it is the embedding.
      after: number of the operation that reads the output of F; -1 if it is the head.
    """

    microbatch: np.ndarray
    chunk: np.ndarray
    stage: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    weight: np.ndarray
    before: np.ndarray
    after: np.ndarray

    @classmethod
    def of(cls, s: Schedule) -> "_Operations":
        """The operations of a schedule."""
        ops = list(s.ops())
        numbers = {None: -1, **{op: i for i, op in enumerate(ops)}}
        every = (
            *zip(*ops, strict=True),
            *([at[op] for op in ops if at] for at in (s.forward, s.backward, s.weight)),
            *([numbers[of(op)] for op in ops] for of in (s.before, s.after)),
        )
        return cls(*(np.array(values, np.int32) for values in every))

    def step(self, sender: np.ndarray, s: Schedule) -> np.ndarray:
        """Stages from a sender to each operation, around a ring if it is no V."""
        step, chunks = (x - x[sender] for x in (self.stage, self.chunk))
        return step if s.folded else np.where(chunks, np.sign(chunks), step)


class _Waits(NamedTuple):
    """The value of each operation that waits in one buffer; arrays [N].

    Attributes:
      start: tick in which it arrives.
      end: tick in which the operation reads it.
      waits: whether there is one.
    """

    start: np.ndarray
    end: np.ndarray
    waits: np.ndarray


def _buffers(ops: _Operations) -> dict[str, _Waits]:
    """{buffer: the values that wait in it}."""
    forward, backward, weight = ops.forward, ops.backward, ops.weight
    all_wait = np.full(forward.shape, True)
    arrivals = np.where(ops.after < 0, forward, backward[ops.after] + 1)
    states = (weight, all_wait) if weight.size else (backward, ~all_wait)
    return {
        "inputs": _Waits(forward[ops.before] + 1, forward, ops.before >= 0),
        "saved": _Waits(forward, backward, all_wait),
        "gradients": _Waits(arrivals, backward, all_wait),
        "states": _Waits(backward, *states),
    }


def _colored(waits: _Waits, stage: np.ndarray) -> tuple[np.ndarray, int]:
    """The slot of each value, and the number of slots, as few as possible.

    Every stage has slots of its own.
    """
    slots, most = np.zeros(waits.start.shape, np.int32), 0
    for one in range(stage.max() + 1):
        own = np.flatnonzero(waits.waits & (stage == one))
        order = own[np.lexsort((own, waits.end[own], waits.start[own]))]
        ticks = waits.start[order].tolist(), waits.end[order].tolist()
        slots[order], count = _slots(zip(*ticks, strict=True))
        most = max(most, count)
    return slots, most


def _slots(intervals: Iterable[tuple[int, int]]) -> tuple[list[int], int]:
    """The slot of each (first tick, last tick), in their order, and how many."""
    slots: list[int] = []
    busy: list[tuple[int, int]] = []  # (last tick, slot), a heap like the next one.
    free: list[int] = []
    count = 0
    for start, end in intervals:
        while busy and busy[0][0] < start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slot = heapq.heappop(free) if free else count
        count = max(count, slot + 1)
        heapq.heappush(busy, (end, slot))
        slots.append(slot)
    return slots, count


def compile_schedule(schedule: Schedule) -> Tables:
    """Compiles a schedule that passes `check.problems` to tables.

    A slot equal to the number of slots means "nowhere": the executor writes values that
    nothing reads to that extra slot.
    """
    s, ops, slots, counts = schedule, _Operations.of(schedule), {}, {}
    for buffer, waits in _buffers(ops).items():
        slots[buffer], counts[buffer] = _colored(waits, ops.stage)
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
    _fill(columns, s, ops, slots)
    return Tables(
        columns,
        tuple(_phases(columns)),
        counts["inputs"],
        counts["saved"],
        counts["gradients"],
        counts["states"],
        s.diverges,
    )


def _fill(
    columns: Columns, s: Schedule, ops: _Operations, slots: dict[str, np.ndarray]
) -> None:
    """Writes all operations into the tables."""
    c, stage, first, last = columns, ops.stage, ops.before < 0, ops.after < 0
    at = ops.forward, stage  # Rows and columns of F.
    c.f_on[at], c.f_microbatch[at], c.f_chunk[at] = 1, ops.microbatch, ops.chunk
    c.f_saved[at], c.f_input[at] = slots["saved"], slots["inputs"]
    c.first[at], c.last[at] = first, last
    c.head_gradient[at] = np.where(last, slots["gradients"], c.head_gradient[at])
    sent = ARRIVALS, ops.before, ops.forward, slots["inputs"]
    back = GRADIENT_ARRIVALS, ops.after, ops.backward + 1, slots["gradients"]
    for names, sender, ticks, places in (sent, back):
        step = ops.step(sender, s)
        for number, name in names.items():
            own = (sender >= 0) & (step == number)
            getattr(c, name)[ticks[sender[own]], stage[own]] = places[own]
    at = ops.backward, stage
    c.b_on[at], c.b_microbatch[at], c.b_chunk[at] = 1, ops.microbatch, ops.chunk
    c.b_gradient[at], c.b_saved[at] = slots["gradients"], slots["saved"]
    c.b_first[at] = first
    if ops.weight.size:
        c.b_state[at] = slots["states"]
        at = ops.weight, stage
        c.w_on[at], c.w_chunk[at], c.w_state[at] = 1, ops.chunk, slots["states"]


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
