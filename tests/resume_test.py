"""Resume anywhere: every layout goes on from every other, bit for bit."""

import contextlib
import functools
import itertools
import pathlib

import jax
import numpy as np
import pytest
from tiny_models import batch, host, lower, model

from meshpar.checkpoint import Checkpoints

ROOT = pathlib.Path(__file__).parent.parent
LAYOUTS = [
    "data=8",
    "fsdp=8,zero=1",
    "fsdp=8,zero=2",
    "fsdp=8,zero=3",
    "tensor=4",
    "fsdp=2,tensor=4",
    "pipe=4,data=2,microbatches=4",
    "pipe=2,fsdp=2,schedule=interleaved,virtual_stages=2,microbatches=2,tensor=2",
]
SAVED, STEPS = 2, 4
TINY = model(depth=4)


@functools.cache
def program(layout):
    return lower(layout, TINY)


def trained(layout, state, first):
    """The state after the last step, and the losses on the way."""
    losses = []
    for step in range(first, STEPS + 1):
        state, found = program(layout).step(state, batch(step))
        losses.append(float(found["loss"]))
    return state, losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(layout)`: folder, state at the checkpoint, and losses without a break."""

    @functools.cache
    def made(layout):
        one, folder = program(layout), tmp_path_factory.mktemp("run") / "c"
        state = one.init(0)
        for step in range(1, SAVED + 1):
            state, _ = one.step(state, batch(step))
        portable = one.in_model_order(state)
        with contextlib.closing(Checkpoints(folder, one.portable_state)) as checkpoints:
            checkpoints.save(SAVED, portable, {"position": 16 * SAVED})
        before = host(portable)
        return folder, before, trained(layout, state, SAVED + 1)[1]

    return made


def pairs():
    """All ordered pairs; of each layout the one to the next is always tried."""
    for before, after in itertools.permutations(LAYOUTS, 2):
        near = (LAYOUTS.index(after) - LAYOUTS.index(before)) % len(LAYOUTS) == 1
        marks = () if near else pytest.mark.slow
        yield pytest.param(before, after, marks=marks)


@pytest.mark.parametrize("before, after", list(pairs()))
def test_any_layout_goes_on_from_any_other(before, after, saved):
    folder, want, unbroken = saved(before)
    one = program(after)
    with contextlib.closing(Checkpoints(folder, one.portable_state)) as checkpoints:
        found = checkpoints.restore()
    assert found.metadata["position"] == 16 * SAVED
    for got, wanted in zip(*map(jax.tree.leaves, (found.state, want)), strict=True):
        np.testing.assert_array_equal(np.asarray(got), wanted)
    _, losses = trained(after, one.as_stored(found.state), SAVED + 1)
    np.testing.assert_allclose(losses, unbroken, rtol=1e-5)
