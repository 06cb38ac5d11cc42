"""Random keys in the optimizer state: planned, trained with, saved and restored."""

import contextlib

import jax
import numpy as np
import optax
import pytest
from support.biased_model import lower, rows, train, train_plainly
from support.tiny_models import host, relative_error

import meshpar
from meshpar.arrays import is_key
from meshpar.checkpoint import Checkpoints
from meshpar.explain.verify import verify

NOISY = optax.chain(optax.add_noise(0.01, 0.5, key=0), optax.sgd(0.1))


@pytest.fixture(scope="module")
def trained():
    program = lower("fsdp=8", NOISY)
    return program, train(program, 2)


def test_noise_equals_a_plain_loop(trained):
    program, state = trained
    want = train_plainly(NOISY, program.init(0).params, 2)[-1]
    assert relative_error(host(state.params), want) < 1e-6
    assert program.violations() == []
    assert "key<fry>" in str(program.plan)


@pytest.mark.parametrize("local", [False, True])
def test_a_checkpoint_restores_the_keys(trained, tmp_path, local):
    program, state = trained
    options = {"local_folder": tmp_path / "disk"} if local else {}

    def opened():
        folder = tmp_path / "checkpoints"
        return contextlib.closing(
            Checkpoints(folder, program.portable_state, **options)
        )

    with opened() as checkpoints:
        checkpoints.save(2, program.in_model_order(state), {}, persistent=not local)
    with opened() as checkpoints:
        restored = program.as_stored(checkpoints.restore().state)
    keys = list(filter(is_key, jax.tree.leaves(restored)))
    own = list(filter(is_key, jax.tree.leaves(state)))
    assert len(keys) == len(own) == 1 and keys[0].dtype == own[0].dtype
    np.testing.assert_array_equal(*map(jax.random.key_data, (keys[0], own[0])))
    restored, metrics = program.step(restored, rows(2))
    assert np.isfinite(metrics["loss"])


@pytest.mark.slow
def test_verify_compares_the_keys(trained):
    report = verify(trained[0], lower("data=1", NOISY), [rows(0)])
    assert report.ok
    compared = {c.tensor for c in report.comparisons if c.kind == "optimizer"}
    assert any("rng_key" in tensor for tensor in compared), compared


@pytest.mark.slow
def test_replicas_have_keys_of_their_own_state():
    program = lower(
        "replica=2,fsdp=2", NOISY, mode=meshpar.LocalSGD(period=2), lowering="jit"
    )
    state = train(program, 2)
    (key,) = filter(is_key, jax.tree.leaves(state.optimizer_state))
    assert key.shape == (2,)
