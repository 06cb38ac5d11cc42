"""Compiled schedules, run with tags instead of arrays: every read finds its value."""

import itertools

import pytest

from meshpar import schedules
from meshpar.schedules.table import Op
from meshpar.schedules.ticks import ARRIVALS, GRADIENT_ARRIVALS, compile_schedule

CASES = [
    (name, stages, num, chunks)
    for stages, num in itertools.product((2, 3, 4, 8), (1, 2, 4, 6, 16))
    for name, chunks in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("zb_h1", 1),
        ("zb_h2", 1),
        ("zb_v", 2),
        ("dualpipe_v", 2),
        ("interleaved", 2),
        ("interleaved", 3),
    )
    if name != "interleaved" or num % stages == 0
    if name != "dualpipe_v" or num >= 2 * stages
]


class Buffers:
    """The buffers of one stage, filled with tags."""

    def __init__(self, tables):
        self.inputs = [None] * (tables.num_inputs + 1)
        self.saved = [None] * (tables.num_saved + 1)
        self.gradients = [None] * (tables.num_gradients + 1)
        self.states = [None] * (tables.num_states + 1)
        self.sent = self.sent_back = None


def run(tables, schedule):
    """Runs all ticks and checks the tag of every slot that is read."""
    num = schedule.num_stages
    stages, done = [Buffers(tables) for _ in range(num)], []
    for tick in range(schedule.num_ticks):
        row = [
            type(tables.columns)(*(column[tick, p] for column in tables.columns))
            for p in range(num)
        ]
        back = [stage.sent_back for stage in stages]
        for p, (stage, r) in enumerate(zip(stages, row, strict=True)):
            for step, column in GRADIENT_ARRIVALS.items():
                stage.gradients[getattr(r, column)] = back[(p - step) % num]
        for p, (stage, r) in enumerate(zip(stages, row, strict=True)):
            op = Op(r.f_microbatch, r.f_chunk, p)
            if r.f_on:
                before = schedule.before(op)
                assert bool(r.first) == (before is None)
                assert r.first or stage.inputs[r.f_input] == ("F", *before)
                stage.saved[r.f_saved], stage.sent = ("S", *op), ("F", *op)
                done.append(("F", op))
                assert bool(r.last) == (schedule.after(op) is None)
                if r.last:
                    stage.gradients[r.head_gradient] = ("H", *op)
            op = Op(r.b_microbatch, r.b_chunk, p)
            if r.b_on:
                after = schedule.after(op)
                gradient = ("B", *after) if after else ("H", *op)
                assert stage.gradients[r.b_gradient] == gradient
                assert stage.saved[r.b_saved] == ("S", *op)
                assert bool(r.b_first) == (schedule.before(op) is None)
                stage.sent_back, stage.states[r.b_state] = ("B", *op), ("W", *op)
                done.append(("B", op))
            if r.w_on:
                state = stage.states[r.w_state]
                assert state[2:] == (r.w_chunk, p)
                done.append(("W", Op(*state[1:])))
        sent = [stage.sent for stage in stages]
        for p, (stage, r) in enumerate(zip(stages, row, strict=True)):
            for step, column in ARRIVALS.items():
                stage.inputs[getattr(r, column)] = sent[(p - step) % num]
    return done


LOCKED = [(*case, True) for case in CASES if case[0] in schedules.ZERO_BUBBLE]
"""Schedules whose stages are out of step, in lock step."""


@pytest.mark.parametrize(
    "name, stages, num, chunks, locked", [*((*c, False) for c in CASES), *LOCKED]
)
def test_every_operation_reads_its_own_inputs(name, stages, num, chunks, locked):
    schedule = schedules.make_schedule(name, stages, num, chunks)
    schedule = schedules.in_lock_step(schedule) if locked else schedule
    assert schedules.problems(schedule) == []
    tables = compile_schedule(schedule)
    done = run(tables, schedule)
    ops = list(schedule.ops())
    for kind in "FBW" if schedule.weight else "FB":
        assert sorted(op for k, op in done if k == kind) == ops
    # Buffers are as small as the schedule allows.
    assert tables.num_saved == max(schedule.in_flight())
    assert tables.num_inputs <= (1 if name not in schedules.ZERO_BUBBLE else 2 * stages)
    ticks = [tick for phase in tables.phases for tick in range(*phase[:2])]
    assert ticks == list(range(schedule.num_ticks))


def test_a_buffer_that_is_too_small_is_found():
    schedule = schedules.make_schedule("1f1b", 4, 8)
    tables = compile_schedule(schedule)
    columns = tables.columns
    broken = columns._replace(f_saved=columns.f_saved % 6, b_saved=columns.b_saved % 6)
    with pytest.raises(AssertionError):
        run(type(tables)(broken, *list(vars(tables).values())[1:]), schedule)
