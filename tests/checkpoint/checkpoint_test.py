"""Checkpoints: any layout to any layout, complete or invisible."""

import errno
import functools
import json
import os
import shutil

import jax
import numpy as np
import optax
import pytest
from support.marks import slow
from support.tiny_models import host
from support.tiny_stack import batch, lower

from meshpar.checkpoint import persistent, read_problems
from meshpar.checkpoint.checkpoints import Checkpoints
from meshpar.errors import CheckpointError


@functools.cache
def trained():
    """A program and its states after steps 1 to 4, on the host."""
    program = lower("fsdp=4,tensor=2")
    state, states = program.init(0), []
    for _ in range(4):
        state, _ = program.step(state, batch())
        states.append(host(state))
    return program, states


def on_devices(program, state):
    shardings = jax.tree.map(lambda leaf: leaf.sharding, program.portable_state)
    return jax.device_put(state, shardings)


@pytest.fixture
def saved(tmp_path):
    """A folder with checkpoints of steps 1 and 2, and the states they hold."""
    program, states = trained()
    checkpoints = Checkpoints(tmp_path / "c", program.portable_state)
    for step in (1, 2):
        state = on_devices(program, states[step - 1])
        checkpoints.save(step, state, {"position": 16 * step})
    checkpoints.close()
    return tmp_path / "c", states[:2]


def restore(folder, layout="data=2", **options):
    program = lower(layout, **options)
    checkpoints = Checkpoints(folder, program.portable_state)
    try:
        restored = checkpoints.restore()
        return program, restored and restored[:2]
    finally:
        checkpoints.close()


def assert_equal(state, want):
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf), wanted)


@pytest.mark.parametrize(
    "layout", [slow("data=1"), "data=8", "fsdp=8,zero=1", "fsdp=2"]
)
def test_restores_bitwise_onto_any_layout(saved, layout):
    folder, states = saved
    program, (state, metadata) = restore(folder, layout)
    assert metadata == {"position": 32}
    assert_equal(state, states[1])
    for path, abstract in program.abstract_state.params.items():
        param = state.params[path]
        assert param.sharding.is_equivalent_to(abstract.sharding, param.ndim)


def test_large_arrays_alone_are_cut_into_parts_of_replicas(tmp_path, monkeypatch):
    cuts, cut = [], jax.lax.slice_in_dim
    monkeypatch.setattr(
        jax.lax, "slice_in_dim", lambda *a, **k: cuts.append(a) or cut(*a, **k)
    )
    program, (state, *_) = trained()
    for name, least in (("small", persistent.PART_BYTES), ("large", 1)):
        monkeypatch.setattr(persistent, "PART_BYTES", least)
        checkpoints = Checkpoints(tmp_path / name, program.portable_state)
        checkpoints.save(1, on_devices(program, state), {})
        checkpoints.close()
        assert bool(cuts) == (name == "large")
        assert_equal(restore(tmp_path / name)[1][0], state)


def test_nothing_to_restore_in_a_new_folder(tmp_path):
    assert restore(tmp_path / "new")[1] is None


def test_keeps_the_newest(saved, tmp_path):
    folder, _ = saved
    program = lower("data=2")
    checkpoints = Checkpoints(folder, program.abstract_state, keep=2)
    checkpoints.save(3, program.init(0), {"position": 0})
    checkpoints.wait()
    assert checkpoints.steps() == [2, 3]
    checkpoints.save(3, program.init(0), {"position": 0})  # Saved once already.
    checkpoints.close()


def test_an_interrupted_write_is_invisible_and_can_be_repeated(saved):
    folder, states = saved
    for name in ("3.orbax-checkpoint-tmp", "3.orbax-checkpoint-tmp-17"):
        shutil.copytree(folder / "2", folder / name)
        (folder / name / "commit_success.txt").unlink(missing_ok=True)
    program, (state, metadata) = restore(folder)
    assert metadata == {"position": 32}
    checkpoints = Checkpoints(folder, program.portable_state)
    state, _ = program.step(state, batch())
    want = host(state)
    checkpoints.save(3, state, {"position": 48})
    checkpoints.close()
    _, (state, metadata) = restore(folder, "data=1")
    assert metadata == {"position": 48}
    assert_equal(state, want)


def damage(kind, step):
    if kind == "truncated":
        files = sorted((step / "state").rglob("*"), key=lambda p: p.is_file())
        for path in files:
            if path.is_file() and path.stat().st_size > 64:
                os.truncate(path, path.stat().st_size // 2)
    elif kind == "missing":
        shutil.rmtree(step / "state")
    elif kind == "changed":
        for file in (step / "state").glob("**/d/*"):
            text = bytearray(file.read_bytes())
            text[-len(text) // 3] ^= 4
            file.write_bytes(text)
    elif kind == "metadata changed":
        path = step / "metadata" / "metadata"
        path.write_text(path.read_text().replace('"position": 32', '"position": 16'))
    else:
        (step / "metadata" / "metadata").write_text("{")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "kind", ["truncated", "missing", "metadata", "changed", "metadata changed"]
)
def test_a_corrupt_newest_checkpoint_is_logged_and_the_one_before_used(
    saved, kind, caplog
):
    folder, states = saved
    damage(kind, folder / "2")
    _, (state, metadata) = restore(folder)
    assert metadata == {"position": 16}
    assert_equal(state, states[0])
    assert "checkpoint 2" in caplog.text and "set aside" in caplog.text
    assert (folder.parent / "corrupt" / "2-0").is_dir()


def test_a_checkpoint_that_one_process_cannot_read_is_restored_by_none(
    saved, monkeypatch, caplog
):
    folder, states = saved
    problems = [("corrupt", "OSError: a torn file")] * 2  # It is read twice.

    def allgather(label, value, timeout_s):
        assert label == "checkpoint read"
        return {0: value, 1: problems.pop() if problems else value}

    monkeypatch.setattr(read_problems, "allgather_objects", allgather)
    _, (state, metadata) = restore(folder)
    assert metadata == {"position": 16}
    assert_equal(state, states[0])
    assert "process(es) [1]: OSError: a torn file" in caplog.text
    assert (folder.parent / "corrupt" / "2-0").is_dir()


def test_metadata_of_the_first_format_still_restores(saved):
    folder, states = saved
    path = folder / "2" / "metadata" / "metadata"
    stored = json.loads(path.read_text())
    for name in ("replicas", "synchronization", "checksums", "checksum"):
        del stored[name]
    path.write_text(json.dumps(stored))
    program, (state, metadata) = restore(folder)
    assert metadata == {"position": 32}
    assert_equal(state, states[1])
    newest = persistent.find_checkpoints(folder)[-1]
    assert persistent.reason_not_restorable(newest, program.portable_state) == ""


def test_a_changed_bit_is_detected_after_reading(saved, monkeypatch):
    """The reader itself may not verify what it reads."""
    folder, states = saved
    read = persistent.read_checkpoint

    def flipped(path, state, extra):
        restored, extra = read(path, state, extra)
        if path.name == "2":
            params = dict(restored.params)
            name = sorted(params)[0]
            bits = np.asarray(params[name]).copy().view(np.uint32)
            bits.flat[7] ^= 1
            sharding = params[name].sharding
            params[name] = jax.device_put(bits.view(np.float32), sharding)
            restored = restored._replace(params=params)
        return restored, extra

    monkeypatch.setattr(persistent, "read_checkpoint", flipped)
    _, (state, metadata) = restore(folder)
    assert metadata == {"position": 16}
    assert_equal(state, states[0])


def test_a_transient_problem_is_an_error_and_moves_nothing(saved, monkeypatch):
    folder, _ = saved

    def stale(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(persistent, "read_checkpoint", stale)
        with pytest.raises(CheckpointError, match="left unchanged.*Stale file"):
            restore(folder)
    assert restore(folder)[1][1] == {"position": 32}


def test_all_corrupt_is_an_error_and_nothing_is_deleted(saved):
    folder, _ = saved
    for step in ("1", "2"):
        damage("truncated", folder / step)
    with pytest.raises(CheckpointError, match=r"none of the checkpoints \[2, 1\]"):
        restore(folder)
    assert len(list((folder.parent / "corrupt").iterdir())) == 2


def test_another_model_or_optimizer_is_an_error(saved):
    folder, _ = saved
    with pytest.raises(
        CheckpointError,
        match="another model.*is .*8, 1.* in the checkpoint and .*16, 1",
    ):
        restore(folder, dim=16)
    with pytest.raises(CheckpointError, match="another model or optim.*and missing in"):
        restore(folder, optimizer=optax.sgd(1.0))
    assert restore(folder)[1] is not None


def test_unwritable_and_full_folders(tmp_path, monkeypatch):
    state = lower("data=1").abstract_state
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write to .*file"):
        Checkpoints(tmp_path / "file" / "c", state)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match="1000 bytes free.*takes about"):
        Checkpoints(tmp_path / "c", state)
    with pytest.raises(CheckpointError, match="keep=0"):
        Checkpoints(tmp_path / "c", state, keep=0)
