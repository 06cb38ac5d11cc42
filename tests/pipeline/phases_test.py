"""Phases of a schedule: which operations their scans hold, and what stages send."""

import itertools

import numpy as np
import pytest

from meshpar import schedules
from meshpar.pipeline.phases import TickLoop, TickOperations
from meshpar.schedules.ticks import Phase, compile_schedule

STAGES, MICROBATCHES = 4, 8


def tick_loop(name, uniform=False):
    chunks = 2 if name == "interleaved" else 1
    schedule = schedules.make_schedule(name, STAGES, MICROBATCHES, chunks)
    return schedule, TickLoop(compile_schedule(schedule), uniform)


LOOPS = [
    *itertools.product(["gpipe", "1f1b", "interleaved"], [False, True]),
    ("zb_h1", False),
]


@pytest.mark.parametrize("name, uniform", LOOPS)
def test_phases_cover_every_tick_and_its_operations(name, uniform):
    schedule, loop = tick_loop(name, uniform)
    starts, stops = zip(*((p.start, p.stop) for p in loop.phases), strict=True)
    assert starts == (0, *stops[:-1]) and stops[-1] == schedule.num_ticks
    for phase in loop.phases:
        used = loop.used_operations(phase)
        assert all(len(flags) == phase.stop - phase.start for flags in used)
        assert phase.forward or not used.forward.any()
        assert phase.backward or not used.backward.any()
        assert phase.weight or not used.weight.any()
        assert phase.head is not False or not used.head.any()


@pytest.mark.parametrize("name, uniform", LOOPS)
def test_every_arriving_value_is_sent(name, uniform):
    schedule, loop = tick_loop(name, uniform)
    # Every F sends an activation, but for those of the last chunk.
    messages = len(list(schedule.ops())) - MICROBATCHES
    columns, arrivals = loop.tables.columns, 0
    for phase in loop.phases:
        ticks = slice(phase.start, phase.stop)
        arrived = (columns.arrived[ticks] < loop.tables.num_inputs).sum()
        assert loop.activation_steps(phase) == ((1,) if arrived else ())
        arrivals += arrived
    assert arrivals == messages
    assert loop.num_activation_sends * STAGES >= messages
    assert loop.num_gradient_sends * STAGES >= messages


def test_phases_leave_out_unused_operations():
    """Of 2(M + P - 1) ticks GPipe runs F in the first half and B in the second."""
    half = MICROBATCHES + STAGES - 1
    _, loop = tick_loop("gpipe")
    assert loop.num_forward_ticks == half
    assert loop.count_ticks("forward") == loop.count_ticks("backward") == half
    assert loop.count_ticks("head") == MICROBATCHES
    assert loop.num_activation_sends == loop.num_gradient_sends == half
    _, uniform = tick_loop("gpipe", uniform=True)
    assert uniform.phases == (Phase(0, 2 * half, True, True, False, None),)
    assert uniform.count_ticks("forward") == uniform.count_ticks("head") == 2 * half
    assert uniform.num_activation_sends == 2 * half
    assert uniform.num_forward_ticks == half


def test_only_split_weight_gradients_make_stages_diverge():
    assert not tick_loop("1f1b")[1].divergent
    _, loop = tick_loop("zb_h1")
    assert loop.divergent and len(loop.phases) == 1
    first_stage = type(loop.tables.columns)(*(c[0, 0] for c in loop.tables.columns))
    operations = loop.operations(loop.phases[0], first_stage, None)
    forward = TickOperations(True, False, False, False, False)
    assert operations == forward  # F alone in tick 0.


def test_operations_of_a_tick_are_constants_except_where_conditionals_select():
    used = TickOperations(*np.array([True, False, True, False, False]))
    _, loop = tick_loop("1f1b")
    fixed = loop.operations(loop.phases[0], None, used)
    assert fixed == (True, False, False, False, False)
    _, uniform = tick_loop("1f1b", uniform=True)
    operations = uniform.operations(uniform.phases[0], None, used)
    assert operations == used and operations.weight is False
    _, interleaved = tick_loop("interleaved")
    (phase,) = (phase for phase in interleaved.phases if phase.head is None)
    assert interleaved.operations(phase, None, used).head is used.head


@pytest.mark.parametrize("stages, buffers", [(2, 2), (4, 1)])
def test_a_last_phase_of_one_tick_has_residuals_of_its_own(stages, buffers):
    schedule = schedules.make_schedule("1f1b", stages, MICROBATCHES, 1)
    loop = TickLoop(compile_schedule(schedule))
    last = loop.phases[-1]
    assert last.stop - last.start == stages - 1
    assert loop.num_backward_buffers == buffers
