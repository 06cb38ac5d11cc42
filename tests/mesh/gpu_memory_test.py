"""Memory of GPUs: what plans use, jax takes, and the compiler may use."""

import os

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from support import commands

from meshpar.mesh import compiler
from meshpar.mesh.chips import CHIPS
from meshpar.mesh.machine import machine_of
from meshpar.mesh.platform import GPU

SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.mark.parametrize("given, want", [(None, 0.92), ("0.5", 0.5)])
def test_commands_give_jax_the_share_that_plans_use(given, want, monkeypatch, capsys):
    monkeypatch.setenv(SHARE, "")  # Restored at the end.
    monkeypatch.delenv(SHARE)
    if given:
        monkeypatch.setenv(SHARE, given)
    commands.run("run", ["--list_settings"], monkeypatch, capsys)
    assert float(os.environ[SHARE]) == want
    chip = CHIPS["h100"]
    planned = machine_of(jax.devices()[:1], chip=chip).memory_bytes
    assert planned == pytest.approx(0.92 * chip.memory_bytes, rel=1e-6)


def test_the_compiler_computes_nothing_again_for_want_of_memory(monkeypatch):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    assert compiler.compiler_options(mesh) is None
    monkeypatch.setattr(compiler, "platform_of", lambda _: GPU)
    ((name, percent),) = compiler.compiler_options(mesh).items()
    assert name == "xla_gpu_memory_limit_slop_factor"
    assert 0.8 * float(percent) / 100 >= 1  # Of the memory of the device.
