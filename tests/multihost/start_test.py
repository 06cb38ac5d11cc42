"""Starts of real processes: what they share and where they listen."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest
from support import processes
from support.marks import slow

ROOT = pathlib.Path(__file__).parents[2]

SUM = """
import sys
import meshpar
from meshpar.multihost import initialize, process_info

meshpar.simulate(1)
initialize(process_info(), 60)
import jax, numpy as np
if folder := sys.argv[1]:
    jax.config.update("jax_compilation_cache_dir", folder)
from jax.sharding import NamedSharding, PartitionSpec

mesh = jax.make_mesh((jax.device_count(),), ("data",))
split, whole = (NamedSharding(mesh, PartitionSpec(*dims)) for dims in (["data"], []))
x = jax.make_array_from_callback((8,), split, lambda part: np.arange(8.0)[part])
print("sum", jax.jit(lambda x: x.sum(), out_shardings=whole)(x))
"""


@pytest.mark.parametrize(
    "host, given_late", [slow("localhost", False), ("[::1]", True)]
)
def test_processes_start_together_with_a_cache_that_serves_one_of_them(
    host, given_late, tmp_path
):
    """Process 0 would find its programs in the cache and wait for the others."""
    family = socket.AF_INET6 if host == "[::1]" else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host.strip("[]"), 0))
        address = f"{host}:{probe.getsockname()[1]}"
    early, late = ("", tmp_path) if given_late else (tmp_path, "")
    cache = {"JAX_COMPILATION_CACHE_DIR": str(early), "PYTHONPATH": str(ROOT)}
    started = []
    for rank in range(2):
        place = {"COORDINATOR": address, "NUM_PROCESSES": "2", "PROCESS_ID": str(rank)}
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", SUM, str(late)],
                env=processes.environment()
                | cache
                | {f"MESHPAR_{name}": value for name, value in place.items()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [process.communicate(timeout=100)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert all("sum 28.0" in text for text in said)
    assert ("all processes compile anew" in said[0]) != given_late
    assert not os.listdir(tmp_path)
