"""Faults of real processes under launch/local.sh: each ends in a resumed run."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from experiments import metrics

ROOT = pathlib.Path(__file__).parent.parent
STEPS, SLOW = 150, pytest.mark.slow


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    words = ["alpha ", "beta ", "gamma ", "delta "]
    path.write_text("".join(np.random.default_rng(0).choice(words, 20_000)))
    return str(path)


def command(text, workdir, *more):
    return [
        *(sys.executable, "-m", "experiments.run", "--recipe=tiny", "--layout=fsdp=2"),
        *(f"--steps={STEPS}", f"--data={text}", f"--workdir={workdir}"),
        *("--set=sample_tokens=0", "--set=checkpoint_every=20", *more),
    ]


def losses(workdir):
    rows = metrics.read(workdir / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    """Losses of two processes that nothing disturbed."""
    workdir = tmp_path_factory.mktemp("unbroken")
    launch = ["launch/local.sh", f"--log_dir={workdir}/logs", "2", "--"]
    done = subprocess.run(
        [*launch, *command(text, workdir)], cwd=ROOT, capture_output=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(workdir)


def saved(workdir):
    """Steps of the complete checkpoints."""
    found = (workdir / "checkpoints").glob("*")
    return [int(path.name) for path in found if path.name.isdigit()]


def pids(logs, process):
    """Ids of all processes that were started under a number so far."""
    said = (logs / f"{process}.log").read_text()
    return [int(pid) for pid in re.findall(r"pid (\d+)", said)]


@pytest.mark.parametrize(
    "process, number, says",
    [
        (1, signal.SIGKILL, "process 1 ended with code 137"),
        pytest.param(0, signal.SIGKILL, "process 0 ended with code 137", marks=SLOW),
        pytest.param(1, signal.SIGTERM, "ended with code 75", marks=SLOW),
        pytest.param(1, signal.SIGSTOP, "ended with code 76", marks=SLOW),
    ],
)
def test_the_run_goes_on(process, number, says, unbroken, text, tmp_path):
    """No step is lost beyond the last checkpoint, and no number changes."""
    logs = tmp_path / "logs"
    launch = ["launch/local.sh", f"--log_dir={logs}", "--max_restarts=3", "2", "--"]
    run = command(text, tmp_path, "--set=watchdog_seconds=4")
    running = subprocess.Popen(
        [*launch, *run], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    while not saved(tmp_path):
        assert running.poll() is None, running.stderr.read().decode()
        time.sleep(0.02)
    complete = max(saved(tmp_path))
    os.kill(pids(logs, process)[0], number)
    said = running.communicate(timeout=200)[1].decode()
    assert running.returncode == 0, said
    assert says in said and "restart 1 of 3, from the last checkpoint" in said
    if number == signal.SIGSTOP:
        assert "that stand still: [1]" in (logs / "0.log").read_text()
    started = re.findall(r"going on from step (\d+)", (logs / "0.log").read_text())
    assert len(started) == 1 and complete <= int(started[0]) < STEPS
    found = losses(tmp_path)
    assert list(found) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(found.values()), list(unbroken.values()), rtol=1e-5)
