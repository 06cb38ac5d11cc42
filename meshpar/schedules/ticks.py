"""A pipeline schedule compiled to int32 tables [tick, stage] that one program can scan.

What waits between ticks lies in buffers: activations and gradients that have arrived,
stage inputs until their backward pass, and what the weight gradient needs. Slots come
from colouring the intervals in which they are taken, so buffers are as small as the
schedule allows. Pure numpy: no jax.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from meshpar.schedules.table import Op, Schedule


class Columns(NamedTuple):
    """What every stage does in every tick; each int32 [ticks, stages].

    Attributes:
      f_on: whether F runs.
      f_microbatch: its microbatch.
      f_chunk: its chunk.
      f_input: slot of its input among the arrived activations.
      f_saved: slot where F leaves what B needs.
      first: whether F reads the embedding instead of `f_input`.
      last: whether the head follows F.
      head_gradient: slot among the gradients for what the head sends back.
      arrived: slot for the activation that arrives at the end of the tick.
      gradient_arrived: slot for the gradient that arrives at its start.
      b_on: whether B runs.
      b_microbatch: its microbatch.
      b_chunk: its chunk.
      b_gradient: slot of the gradient it reads.
      b_saved: slot of what F left.
      b_first: whether the embedding's gradient follows B.
      b_state: slot where B leaves what W needs.
      w_on: whether W runs.
      w_chunk: its chunk.
      w_state: slot of what B left.
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
    gradient_arrived: np.ndarray
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


class Phase(NamedTuple):
    """Consecutive ticks in which the same slots are in use on some stage.

    Attributes:
      start: first tick.
      stop: tick after the last one.
      forward: whether F runs; likewise backward and weight.
      backward: whether B runs.
      weight: whether W runs.
      head: whether the head runs; None if only in some of the ticks.
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
      columns: what every stage does in every tick.
      phases: the ticks in runs of equal kind, in order.
      num_inputs: slots for activations that have arrived.
      num_saved: slots for what B needs from F.
      num_gradients: slots for gradients that have arrived.
      num_states: slots for what W needs from B.
    """

    columns: Columns
    phases: tuple[Phase, ...]
    num_inputs: int
    num_saved: int
    num_gradients: int
    num_states: int


def _colored(intervals: Iterable[tuple[int, int, Op]]) -> tuple[dict[Op, int], int]:
    """Slots for intervals (first tick, last tick, key), as few as can be."""
    slots: dict[Op, int] = {}
    busy: list[tuple[int, int]] = []
    count = 0
    for start, end, key in sorted(intervals):
        free = set(range(count)) - {slot for until, slot in busy if until >= start}
        busy = [(until, slot) for until, slot in busy if until >= start]
        slot = min(free, default=count)
        count = max(count, slot + 1)
        busy.append((end, slot))
        slots[key] = slot
    return slots, count


def compile_schedule(schedule: Schedule) -> Tables:
    """Turns a schedule without problems into tables.

    A slot number equal to the number of slots means "nowhere": a place that is
    written where nothing is to be kept.
    """
    s = schedule
    intervals: dict[str, list[list[tuple[int, int, Op]]]] = {
        kind: [[] for _ in range(s.num_stages)]
        for kind in ("inputs", "saved", "gradients", "states")
    }
    for op in s.ops():
        f, b, at = s.forward[op], s.backward[op], op.stage
        intervals["saved"][at].append((f, b, op))
        if before := s.before(op):
            intervals["inputs"][at].append((s.forward[before] + 1, f, op))
        after = s.after(op)
        came = s.backward[after] + 1 if after else f
        intervals["gradients"][at].append((came, b, op))
        if s.weight:
            intervals["states"][at].append((b, s.weight[op], op))
    slots, counts = {}, {}
    for kind, stages in intervals.items():
        colored = [_colored(stage) for stage in stages]
        slots[kind] = {op: slot for found, _ in colored for op, slot in found.items()}
        counts[kind] = max(count for _, count in colored)

    shape = s.num_ticks, s.num_stages
    nowhere = {
        "f_saved": counts["saved"],
        "head_gradient": counts["gradients"],
        "arrived": counts["inputs"],
        "gradient_arrived": counts["gradients"],
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
    )


def _fill(columns: Columns, s: Schedule, op: Op, slots: dict) -> None:
    """Writes one operation into the tables."""
    at = s.forward[op], op.stage
    columns.f_on[at] = 1
    columns.f_microbatch[at], columns.f_chunk[at] = op.microbatch, op.chunk
    columns.f_saved[at] = slots["saved"][op]
    if before := s.before(op):
        columns.f_input[at] = slots["inputs"][op]
        columns.arrived[s.forward[before], op.stage] = slots["inputs"][op]
    else:
        columns.first[at] = 1
    if after := s.after(op):
        came = s.backward[after] + 1, op.stage
        columns.gradient_arrived[came] = slots["gradients"][op]
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


_MOST_PHASES_OF_A_RUN = 2


def _phases(columns: Columns) -> Iterator[Phase]:
    """Runs of ticks with the same slots; cut at the head where that makes few runs."""
    used = [column.any(axis=1) for column in (columns.f_on, columns.b_on, columns.w_on)]
    kinds = list(zip(*(column.tolist() for column in used), strict=True))
    head = columns.last.any(axis=1).tolist()
    start = 0
    for kind, ticks in itertools.groupby(kinds):
        stop = start + len(list(ticks))
        runs = [(on, len(list(run))) for on, run in itertools.groupby(head[start:stop])]
        if len(runs) > _MOST_PHASES_OF_A_RUN:
            yield Phase(start, stop, *kind, None)
        else:
            for on, length in runs:
                yield Phase(start, start + length, *kind, on)
                start += length
        start = stop
