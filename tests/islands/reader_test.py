"""Readers of whole versions beside islands that train."""

import contextlib
import dataclasses
import threading

import numpy as np
import pytest
from support import chosen_pushes
from support.chosen_pushes import OWNERS, largest, loop
from support.island_reference import batch, given

from meshpar.errors import MeshparError

STEPS, HISTORY = 6, 2


@contextlib.contextmanager
def watched(reader):
    """[what a reader sees] while the body runs."""
    seen, stop = [], threading.Event()

    def watch():
        while not stop.wait(0.002):
            seen.append(reader.pull_version())

    thread = threading.Thread(target=watch)
    thread.start()
    yield seen
    stop.set()
    thread.join()


def stepped(program, state, step):
    """The next state, and the bits of the store once everybody waits."""
    state, _ = program.step(state, batch(step))
    program.host.drain()
    return state, program.host.center()


def test_a_reader_gets_the_bits_of_every_version_while_islands_train():
    program = chosen_pushes.lowered(dataclasses.replace(OWNERS, history=HISTORY))
    state = program.init(0, given())
    with pytest.raises(MeshparError, match="make a step first"):
        program.reader()
    state, first = stepped(program, state, 0)
    reader, store = program.reader(), {2: first}
    with watched(reader) as seen:
        for step in range(1, STEPS):
            state, store[step + 2] = stepped(program, state, step)
    kept = range(STEPS + 1 - HISTORY, STEPS + 2)
    for version, found in seen + [reader.pull_version(v) for v in kept]:
        assert list(found) == ["own"] and found["own"].shape == (4, 4)
        np.testing.assert_array_equal(found["own"].ravel(), store[version])
    wanted = np.reshape(loop(STEPS, largest, workers=2), (-1, 16))
    np.testing.assert_allclose(list(store.values()), wanted, rtol=0, atol=1e-6)
    gone = kept[0] - 1
    with pytest.raises(MeshparError, match=f"version {gone} is gone.*larger history"):
        reader.pull_version(gone)
    with pytest.raises(MeshparError, match=f"version={STEPS + 2}: use 0 to"):
        reader.pull_version(STEPS + 2)
    portable, extra = program.in_model_order(state), program.extra_state(state)
    program.close()
    again = chosen_pushes.fresh(program)
    stepped(again, again.as_stored(portable, extra), STEPS)
    _, found = again.reader().pull_version(STEPS)
    np.testing.assert_array_equal(found["own"].ravel(), store[STEPS])
    again.close()
