"""A write that fails in one of two processes ends both at once, with its reason."""

import socket
import subprocess
import sys
import threading

import pytest
from support.marks import slow

from meshpar.checkpoint import failed_writes

PROGRAM = """
import os, pathlib, resource, sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from meshpar.checkpoint import failed_writes
from meshpar.checkpoint.persistent import PersistentTier
from meshpar.errors import MeshparError

failed_writes._GRACE_S = 0.2
address, process, failing, folder = sys.argv[1:]
jax.distributed.initialize(address, 2, int(process))
sharding = NamedSharding(Mesh(np.array(jax.devices()), "x"), PartitionSpec("x"))
noise = np.random.default_rng(0).normal(size=2048).astype("float32")
state = {"x": jax.make_array_from_callback((4096,), sharding, lambda _: noise)}
tier = PersistentTier(pathlib.Path(folder), keep=2, num_bytes=2**15)
tier.save(1, state, None, {})
tier.wait()
if process == failing:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard))
try:
    tier.save(2, state, None, {})
    tier.wait()
except MeshparError as error:
    print(error, flush=True)
    tier.close()
if process == "0":  # It serves the other until that has ended.
    sys.stdin.read()
os._exit(0)
"""


def both(folder, failing):
    """What two processes print of which one cannot write."""
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    words = [sys.executable, "-c", PROGRAM, address]
    running = [
        subprocess.Popen(
            [*words, str(process), str(failing), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in (0, 1)
    ]
    try:
        return [each.communicate(timeout=100)[0] for each in reversed(running)]
    finally:
        for each in running:
            each.kill()
            each.communicate()


@pytest.mark.parametrize("failing", [slow(0), 1])
def test_a_full_disk_in_one_process_ends_both(failing, tmp_path):
    """Their threads wait at different barriers, for 20 minutes if they are left."""
    for said in both(tmp_path, failing):
        assert "File too large" in said and "unchanged: [1]" in said
        assert "Traceback" not in said


class Store(dict):
    """A key-value store of several processes."""

    key_value_set, key_value_try_get = dict.__setitem__, dict.__getitem__


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError("3/4 futures"), failed_writes.WriteStalledError),
        (OSError("File too large"), failed_writes.WriteFailedError),
    ],
)
def test_others_learn_whether_a_write_took_too_long(error, kind, monkeypatch):
    """The run starts again after one, by itself; a disk needs a person."""
    store, never = Store(), threading.Event()
    monkeypatch.setattr(failed_writes.compat, "coordination_client", lambda: store)
    monkeypatch.setattr(failed_writes, "_GRACE_S", 0.01)
    own, other, elsewhere = map(failed_writes.FailedWrites, ("/a/run", "/a/run", "/b"))
    other._key = elsewhere._key = own._key
    own._note("background save thread, directory: /b/2", error)
    assert not store
    own._note("background save thread, directory: /a/run/2", error)
    for writes in (own, other):
        writes.close()
        with pytest.raises(failed_writes.WriteFailedError, match=str(error)) as raised:
            writes.wait(never.wait)
        assert type(raised.value) is kind
    never.set()
