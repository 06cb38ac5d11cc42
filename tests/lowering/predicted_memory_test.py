"""When what the ticks of a pipeline hold is in memory at one time."""

import pytest

from meshpar.lowering import memory
from meshpar.lowering.layer_trace import TracedLayer
from meshpar.lowering.memory import Held, predicted_memory

STATE = dict.fromkeys(("parameters", "optimizer", "synchronization"), 0)
NOTHING = TracedLayer(*[0] * len(TracedLayer._fields))


def predicted(traced, **held):
    held = Held(weights=0, in_ticks=True, **held)
    return predicted_memory(STATE, NOTHING._replace(**traced), held).total


def test_what_stages_have_saved_stands_beside_a_backward_pass_once():
    """Layers write it into its buffer as they run."""
    found = predicted({"running": 1000}, activations=500, runs_both_ways=True)
    assert found == 500 + memory._RUNNING_IN_TICKS * 1000


@pytest.mark.parametrize("both", [True, False])
def test_gradients_are_scattered_when_all_that_was_saved_is_read(both):
    """Where all passes forward come first; else compilers may hold it longer."""
    size = memory._SCATTERED * 2 * 1000  # Embedding and head.
    scattered = {"scatters": True, "runs_both_ways": both}
    found = predicted({"largest": 1000}, activations=2000, **scattered)
    assert found == (2000 + size if both else max(size, 2000 + 1000))
