"""Runs that go on in fewer processes under a fallback layout, and grow back."""

import os
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from support import processes
from support.tiny_runs import ROOT, command, config, losses, train

from meshpar import LayoutError, layouts
from meshpar.errors import ConfigError
from meshpar.runs import fallbacks
from meshpar.runs.trainer import Trainer


@pytest.mark.parametrize(
    "words, number, layout",
    [
        ("fsdp=4", 2, "fsdp=4,microbatches=2"),
        ("data=2", 1, "data=2,microbatches=4"),
        ("tensor=2", 1, "tensor=2,microbatches=8"),
        ("fsdp=4,microbatches=1", 2, "fsdp=4"),
        (" fsdp=6 ; fsdp=2", 3, "fsdp=6,microbatches=2"),
    ],
)
def test_the_batch_is_kept_by_accumulation(words, number, layout):
    whole = layouts.parse("fsdp=8")
    found = fallbacks.parse(words, whole, 4).layouts
    assert next(iter(found)) == 4 and found[4] == whole
    assert found[number] == layouts.parse(layout)


@pytest.mark.parametrize(
    "words, says",
    [
        ("fsdp=3", "each of the 4 processes has 2"),
        ("fsdp=8", "fill a multiple of that below all"),
        ("fsdp=16", "fills 16 of the 8 devices"),
        ("fsdp=4;data=4", 'data=4": "fsdp=4.*" fills 2 processes, too'),
        ("replica=2,fsdp=2", "replica=2, but the run has 1"),
        ("fsdp=4;fdsp=2", "did you mean 'fsdp'"),
    ],
)
def test_a_layout_that_cannot_be_fallen_back_to_is_an_error(words, says):
    with pytest.raises((ConfigError, LayoutError), match=says):
        fallbacks.parse(words, layouts.parse("fsdp=8"), 4)


def start(text, workdir, address, rank, supervise=()):
    place = {"COORDINATOR": address, "NUM_PROCESSES": "2", "PROCESS_ID": str(rank)}
    run = command(
        *(text, workdir, "--layout=fsdp=4", "--fallback_layouts=fsdp=2"),
        *("--start_timeout=8", "--steps=120", "--set=checkpoint_every=20"),
    )
    with (workdir / f"{rank}.log").open("ab") as log:
        return subprocess.Popen(
            [*supervise, *run],
            cwd=ROOT,
            env=processes.environment()
            | {f"MESHPAR_{name}": value for name, value in place.items()},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def wait_until(condition, running, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and running.poll() is None
        time.sleep(0.02)


def test_a_fallback_that_does_not_fit_the_batch_is_an_error_at_the_start(
    text, tmp_path
):
    whole = layouts.parse("fsdp=4")
    found = fallbacks.parse("fsdp=2,microbatches=3", whole, 2)
    tiny = config(text, tmp_path / "run", layout=str(whole))
    with pytest.raises(ConfigError, match=r'--fallback_layouts, "fsdp=2.*not divide'):
        Trainer(tiny, whole, jax.devices()[:4], fallbacks=found)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_goes_on_in_fewer_processes_and_grows_back(text, tmp_path):
    (tmp_path / "run").mkdir()
    log = tmp_path / "run/0.log"
    with socket.socket() as found:
        found.bind(("localhost", 0))
        address = f"localhost:{found.getsockname()[1]}"
    supervise = [sys.executable, "-m", "experiments.supervise", "--restarts=5"]
    supervise += ["--backoff=0.1", f"--log_dir={tmp_path}", "--"]
    zero = start(text, tmp_path / "run", address, 0, supervise=supervise)
    one = start(text, tmp_path / "run", address, 1)
    wait_until(lambda: list(tmp_path.glob("run/checkpoints/20")), zero)
    os.kill(one.pid, signal.SIGKILL)
    one.wait()
    wait_until(lambda: "the run goes on in 1 process" in log.read_text(), zero)
    again = start(text, tmp_path / "run", address, 1)
    assert [process.wait(200) for process in (zero, again)] == [0, 0], log.read_text()
    said = log.read_text()
    assert "layout: fsdp=2,zero=3,microbatches=2 on 2 cpu device(s), 1 proc" in said
    assert "processes have come that were missing" in said
    assert len(re.findall(r"layout: fsdp=4,zero=3 on 4 cpu device", said)) == 2
    found = losses(tmp_path / "run")
    assert list(found) == list(range(1, 121))
    train(config(text, tmp_path / "unbroken", steps=120), "fsdp=4")
    unbroken = losses(tmp_path / "unbroken")
    np.testing.assert_allclose(list(found.values()), list(unbroken.values()), rtol=1e-4)
