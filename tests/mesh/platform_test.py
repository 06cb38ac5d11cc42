"""Platforms by jax's names and by the devices of a mesh."""

import os
import subprocess
import sys

import jax
import pytest
from jax._src import hardware_utils

import meshpar
from meshpar import compat
from meshpar.errors import MeshparError
from meshpar.mesh import platform


@pytest.mark.parametrize(
    "name, expected",
    [
        ("cpu", platform.CPU),
        ("gpu", platform.GPU),
        ("cuda", platform.GPU),
        ("rocm", platform.GPU),
        ("tpu", platform.TPU),
    ],
)
def test_platforms_by_name(name, expected):
    assert platform.platform_named(name) is expected


def test_an_unknown_platform_is_refused():
    with pytest.raises(MeshparError, match="'npu' is not supported.*cpu, gpu, tpu"):
        platform.platform_named("npu")


def test_the_platform_of_a_mesh_and_of_a_trace():
    mesh = meshpar.mesh.make_mesh(meshpar.Layout(data=2), jax.devices()[:2])
    assert platform.platform_of(mesh) is platform.CPU
    assert platform.traced_platform() is platform.CPU


_OF_TPUS = ("JAX_PLATFORMS", "TPU_", "LIBTPU_")

QUIET = """
import jax, meshpar
meshpar.simulate(2)
print(len(jax.devices("cpu")))
"""

AHEAD = """
from meshpar.mesh.topologies import topology
print(len(topology("v5e:2x4")))
"""


@pytest.mark.parametrize("code, said", [(QUIET, "2"), (AHEAD, "8")])
def test_nothing_is_said_of_tpus_that_are_not_there(code, said):
    """The compiler for TPUs is installed, and nobody has chosen a platform."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={k: v for k, v in os.environ.items() if not k.startswith(_OF_TPUS)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, said, "")


def test_the_compiler_of_cpus_is_quick_and_flags_of_the_user_stay(monkeypatch):
    own = "--xla_backend_optimization_level=3 --xla_dump_to=x"
    monkeypatch.setenv("XLA_FLAGS", own)
    compat.quicken_cpu_compiler()
    flags = os.environ["XLA_FLAGS"].split()
    assert flags[:2] == own.split()
    assert "--xla_cpu_parallel_codegen_split_count=1" in flags[2:]
    compat.quicken_cpu_compiler()
    assert os.environ["XLA_FLAGS"].split() == flags
    monkeypatch.delenv("XLA_FLAGS")
    compat.quicken_cpu_compiler()
    assert "--xla_backend_optimization_level=1" in os.environ["XLA_FLAGS"].split()


@pytest.mark.parametrize("chips, forced", [(4, False), (0, True)])
def test_tpus_that_are_there_are_described_by_the_machine(chips, forced, monkeypatch):
    for name in ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    found = hardware_utils, "num_available_tpu_chips_and_device_id"
    monkeypatch.setattr(*found, lambda: (chips, None))
    if forced:
        monkeypatch.setenv("JAX_FORCE_TPU_INIT", "1")
    compat.quiet_absent_tpus()
    assert "TPU_ACCELERATOR_TYPE" not in os.environ
    assert "TPU_WORKER_HOSTNAMES" not in os.environ
