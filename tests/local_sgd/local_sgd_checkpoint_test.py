"""Checkpoints of local SGD, also while a fragment travels."""

import contextlib
import dataclasses

import jax
import numpy as np
import optax
import pytest
from support.marks import slow
from support.regression import ADAM, NESTEROV, STEPS, lower, rows, train
from support.tiny_models import host, relative_error

import meshpar
from meshpar import local_sgd
from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.checkpoint.persistent import PersistentTier


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint after 8 steps, in which a fragment travels, and its program."""
    mode = meshpar.LocalSGD(6, staleness=4, outer=NESTEROV, wire="int8")
    program = lower("replica=2,fsdp=2", ADAM, mode=mode)
    state, _ = train(program, 8)
    folder = tmp_path_factory.mktemp("run") / "c"
    with contextlib.closing(opened(folder, program)) as checkpoints:
        extra = program.extra_state(state)
        checkpoints.save(8, program.in_model_order(state), {}, extra)
    return folder, program, host(state)


def opened(folder, program):
    return Checkpoints(
        folder,
        program.portable_state,
        num_replicas=program.layout.replica,
        abstract_extra=program.abstract_extra,
        extra_identity=program.extra_identity,
    )


def restored(folder, program):
    with contextlib.closing(opened(folder, program)) as checkpoints:
        return checkpoints.restore()


def test_resumes_bit_for_bit_while_a_fragment_travels(saved):
    folder, program, _ = saved
    checkpoint = restored(folder, program)
    assert checkpoint.note == ""
    state = program.as_stored(checkpoint.state, checkpoint.extra)
    for step in range(9, STEPS + 1):
        state, _ = program.step(state, rows(step))
    unbroken = train(program)[0]
    for resumed, want in zip(*map(jax.tree.leaves, (state, unbroken)), strict=True):
        np.testing.assert_array_equal(np.asarray(resumed), np.asarray(want))


@pytest.mark.parametrize(
    "layout, note",
    [
        slow("replica=2,tensor=2", "kept apart"),
        ("replica=4", "replaced by their average"),
        slow("data=2", "replaced by their average"),
    ],
)
def test_restores_onto_other_replicas_through_the_average(saved, layout, note):
    folder, program, before = saved
    mode = program.mode if "replica" in layout else None
    other = lower(layout, ADAM, mode=mode)
    checkpoint = restored(folder, other)
    assert "2 replicas" in checkpoint.note and note in checkpoint.note
    state = other.as_stored(checkpoint.state, checkpoint.extra)
    average = {path: x.mean(0) for path, x in before.params.items()}
    assert relative_error(host(other.weights(state)), average) < 1e-6
    if note == "kept apart":
        for path, x in host(state.params).items():
            np.testing.assert_array_equal(x, before.params[path])
    for step in range(9, STEPS + 1):  # No arrival of the dropped fragment.
        state, metrics = other.step(state, rows(step))
    assert np.isfinite(metrics["loss"])


@pytest.mark.slow
def test_another_mode_drops_the_traveling_fragment(saved):
    """Its shapes are equal, but its schedule differs."""
    folder, program, before = saved
    mode = dataclasses.replace(program.mode, period=7)
    other = lower("replica=2,fsdp=2", ADAM, mode=mode)
    checkpoint = restored(folder, other)
    assert "kept apart" in checkpoint.note and checkpoint.extra is None
    state = other.as_stored(checkpoint.state, checkpoint.extra)
    for path, x in host(state.params).items():
        np.testing.assert_array_equal(x, before.params[path])
    for step in range(9, STEPS + 1):
        state, metrics = other.step(state, rows(step))
    assert np.isfinite(metrics["loss"])


def test_another_outer_optimizer_of_equal_state_is_not_resumed(saved):
    folder, program, _ = saved
    mode = dataclasses.replace(program.mode, outer=optax.sgd(0.1, 0.9, nesterov=True))
    other = lower("replica=2,fsdp=2", ADAM, mode=mode)
    checkpoint = restored(folder, other)
    assert "outer momentum start anew" in checkpoint.note and checkpoint.extra is None


def test_an_identity_without_an_outer_optimizer_still_resumes(saved, monkeypatch):
    """Earlier versions did not name it."""
    folder, program, _ = saved
    former = program.mode.identity().partition(", outer=")[0]
    metadata = PersistentTier.metadata

    def of_an_earlier_version(self, name):
        found = metadata(self, name)
        found["synchronization"]["mode"] = former
        return found

    monkeypatch.setattr(PersistentTier, "metadata", of_an_earlier_version)
    checkpoint = restored(folder, program)
    assert "does not say its outer=" in checkpoint.note
    assert checkpoint.extra is not None


def test_identities_differ_between_outer_optimizers():
    def cosine(steps):
        return optax.sgd(optax.cosine_decay_schedule(0.4, steps), 0.9)

    outers = [None, *(optax.sgd(rate) for rate in (0.4, 1.0))]
    outers += [optax.sgd(0.4, 0.9), optax.sgd(0.4, 0.9, nesterov=True)]
    outers += [cosine(100), cosine(200), optax.adam(0.1), optax.adam(0.1, eps=1e-6)]
    modes = [meshpar.LocalSGD(4, outer=outer) for outer in outers]
    assert len({mode.identity() for mode in modes}) == len(modes)
    again = meshpar.LocalSGD(4, outer=cosine(200))
    assert again.identity() == modes[6].identity()


def test_identities_differ_between_modes():
    warm = meshpar.LocalSGD(local_sgd.warm_up(8, 4))
    assert warm.identity() == meshpar.LocalSGD(local_sgd.warm_up(8, 4)).identity()
    others = [meshpar.LocalSGD(local_sgd.warm_up(9, 4)), meshpar.LocalSGD(4)]
    others += [meshpar.LocalSGD(8, staleness=1), meshpar.LocalSGD(8, staleness=2)]
    assert len({mode.identity() for mode in (warm, *others)}) == 5


@pytest.mark.slow
def test_a_synchronous_checkpoint_starts_replicas(tmp_path):
    program = lower("data=2", ADAM)
    state, _ = train(program, 3)
    with contextlib.closing(opened(tmp_path / "c", program)) as checkpoints:
        checkpoints.save(3, state, {})
    mode = meshpar.LocalSGD(4, staleness=1)
    other = lower("replica=4", ADAM, mode=mode)
    checkpoint = restored(tmp_path / "c", other)
    new = other.as_stored(checkpoint.state, checkpoint.extra)
    for path, x in host(new.params).items():
        np.testing.assert_array_equal(x, np.stack([state.params[path]] * 4))
    new, _ = other.step(new, rows(4))
    assert int(new.step) == 4
