"""When what the ticks of a pipeline hold is in memory at one time."""

import pytest

from meshpar import schedules
from meshpar.lowering import memory
from meshpar.lowering.layer_trace import TracedLayer
from meshpar.lowering.memory import Held, predicted_memory
from meshpar.pipeline.stage_memory import buffer_bytes
from meshpar.schedules.ticks import compile_schedule

STATE = dict.fromkeys(("parameters", "optimizer", "synchronization"), 0)
NOTHING = TracedLayer(*[0] * len(TracedLayer._fields))


def predicted(traced, **held):
    held = Held(weights=0, in_ticks=True, **held)
    return predicted_memory(STATE, NOTHING._replace(**traced), held).total


def test_what_stages_have_saved_stands_beside_a_backward_pass_once():
    """Layers write it into its buffer as they run."""
    found = predicted({"running": 1000}, activations=500, runs_both_ways=True)
    assert found == 500 + memory._RUNNING_IN_TICKS * 1000


@pytest.mark.parametrize("steps, each", [("out of step", 100), ("lock step", 128)])
def test_heads_that_wait_for_their_weight_gradients_are_padded_in_lock_step(
    steps, each
):
    """Out of step a dim that fills whole tiles is last in memory (`memory_order`)."""
    schedule = schedules.make_schedule("zb_h1", 2, 4, 1)
    if steps == "lock step":
        schedule = schedules.in_lock_step(schedule)
    tables = compile_schedule(schedule)
    traced = NOTHING._replace(deferred=100, deferred_padding=28)
    assert tables.num_states > 0
    found = buffer_bytes(tables, traced, rows=3, per_slot=0)
    assert found == (tables.num_states + 1) * 3 * each


@pytest.mark.parametrize("both", [True, False])
def test_gradients_are_scattered_when_all_that_was_saved_is_read(both):
    """Where all passes forward come first; else compilers may hold it longer."""
    size = memory._SCATTERED * 2 * 1000  # Embedding and head.
    scattered = {"scatters": True, "runs_both_ways": both}
    found = predicted({"largest": 1000}, activations=2000, **scattered)
    assert found == (2000 + size if both else max(size, 2000 + 1000))
