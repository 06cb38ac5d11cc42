"""The interface of tiers: each one stores, lists and returns checkpoints alike."""

import contextlib

import jax
import pytest
from checkpoint_test import assert_equal, on_devices, trained

from meshpar.checkpoint.local import LocalTier
from meshpar.checkpoint.persistent import PersistentTier
from meshpar.checkpoint.read_problems import Kind, Problem, Problems


def local_tier(folder):
    return LocalTier(folder, start="0")


def persistent_tier(folder):
    return PersistentTier(folder, keep=2, num_bytes=1)


@pytest.fixture(params=[local_tier, persistent_tier])
def open_tier(request, tmp_path):
    return lambda: contextlib.closing(request.param(tmp_path / "run" / "c"))


def test_a_tier_returns_what_it_has_saved(open_tier):
    program, states = trained()
    with open_tier() as tier:
        assert tier.checkpoints() == []
        for step in (1, 2):
            state = on_devices(program, states[step - 1])
            tier.save(step, state, None, {"position": step})
            tier.wait()
    with open_tier() as tier:
        checkpoints = tier.checkpoints()
        assert [step for step, _ in checkpoints] == [1, 2]
        for step, name in checkpoints:
            assert tier.metadata(name) == {"position": step}
            state, extra = tier.read(name, program.portable_state, None)
            assert_equal(state, states[step - 1])
            shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
            wanted = jax.tree.map(lambda leaf: leaf.sharding, program.portable_state)
            assert shardings == wanted and extra is None


def test_a_rejected_checkpoint_is_not_offered_again(open_tier, caplog):
    program, states = trained()
    with open_tier() as tier:
        for step in (1, 2):
            tier.save(step, on_devices(program, states[step - 1]), None, {})
            tier.wait()
        _, (_, newest) = tier.checkpoints()
        corrupt = Problems.everywhere(Problem(Kind.CORRUPT, "a torn file"))
        tier.reject(newest, corrupt)
        tier.discard_after(1)
        assert [step for step, _ in tier.checkpoints()] == [1]
    assert "a torn file" in caplog.text
