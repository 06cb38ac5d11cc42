"""Faults of real processes under launch/local.sh: each ends in a resumed run."""

import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from support import processes
from support.marks import slow

from meshpar.runs import metrics

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 150


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
        [*launch, *command(text, workdir)],
        cwd=ROOT,
        env=processes.environment(),
        capture_output=True,
        timeout=200,
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
    "moment, process, number, says",
    [
        slow("step", 1, signal.SIGKILL, "process 1 ended with code 137"),
        slow("step", 0, signal.SIGKILL, "process 0 ended with code 137"),
        slow("step", 1, signal.SIGTERM, "ended with code 75"),
        slow("step", 1, signal.SIGSTOP, "ended with code 76"),
        slow("start", 0, signal.SIGKILL, "process 0 ended with code 137"),
        slow("start", 1, signal.SIGKILL, "process 1 ended with code 137"),
        slow("write", 0, signal.SIGKILL, "process 0 ended with code 137"),
        slow("write", 1, signal.SIGKILL, "process 1 ended with code 137"),
    ],
)
def test_the_run_goes_on(moment, process, number, says, unbroken, text, tmp_path):
    """No step is lost beyond the last checkpoint, and no number changes."""
    logs, checkpoints = tmp_path / "logs", tmp_path / "checkpoints"
    launch = ["launch/local.sh", f"--log_dir={logs}", "--max_restarts=3", "2", "--"]
    run = command(text, tmp_path, "--set=watchdog_seconds=4")
    come = {
        "start": lambda: (logs / f"{process}.log").exists() and pids(logs, process),
        "write": lambda: list(checkpoints.glob("*tmp*")),
        "step": lambda: saved(tmp_path),
    }[moment]
    running = subprocess.Popen(
        [*launch, *run],
        cwd=ROOT,
        env=processes.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    while not come():
        assert running.poll() is None, running.stderr.read().decode()
        time.sleep(0.005)
    complete = max(saved(tmp_path), default=0)
    os.kill(pids(logs, process)[0], number)
    if moment == "write" and process == 0:  # It writes the last word.
        assert list(checkpoints.glob("*tmp*"))
    said = running.communicate(timeout=200)[1].decode()
    assert running.returncode == 0, said
    assert says in said and "restart 1 of 3, from the last checkpoint" in said
    if number == signal.SIGSTOP:
        assert "stalled process(es): [1]" in (logs / "0.log").read_text()
    started = re.findall(r"going on from step (\d+)", (logs / "0.log").read_text())
    assert all(complete <= int(step) < STEPS for step in started)
    assert started or not complete
    found = losses(tmp_path)
    assert list(found) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(found.values()), list(unbroken.values()), rtol=1e-5)


def machines(text, workdir, layout, *more):
    """Starts two processes, each with a disk of its own."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        address = f"localhost:{found.getsockname()[1]}"
    started = []
    for process in range(2):
        own = f"--checkpoint_local_dir={workdir}/disk{process}"
        place = {"COORDINATOR": address, "NUM_PROCESSES": 2, "PROCESS_ID": process}
        started.append(
            subprocess.Popen(
                [*command(text, workdir, f"--layout={layout}", own, *more)],
                cwd=ROOT,
                env=processes.environment()
                | {f"MESHPAR_{k}": str(v) for k, v in place.items()},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return started


def said_by(started):
    said = [process.communicate(timeout=200)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    return said


@pytest.mark.slow
def test_a_replaced_machine_gets_its_shards_from_a_peer(unbroken, text, tmp_path):
    """The run goes on from the newest local step, though one disk is empty."""
    often = ["--set=checkpoint_every=50", "--set=checkpoint_local_every=10"]
    running = machines(text, tmp_path, "data=2", *often)
    while not list(tmp_path.glob("disk0/*/80-*/0.npz")):
        assert running[0].poll() is None, running[0].communicate()[0]
        time.sleep(0.02)
    for process in running:
        process.kill()
        process.communicate()
    shutil.rmtree(tmp_path / "disk1")
    said = said_by(machines(text, tmp_path, "data=2", *often))
    (step,) = map(int, re.findall(r"going on from step (\d+)", said[0]))
    assert step % 10 == 0 and 80 <= step < STEPS and step > max(50, step // 50 * 50)
    found = losses(tmp_path)
    np.testing.assert_allclose(list(found.values()), list(unbroken.values()), rtol=1e-5)


@pytest.mark.slow
def test_disks_together_serve_another_layout(unbroken, text, tmp_path):
    """Shards that fsdp=2 left on two disks are resumed as tensor=2."""
    often = ["--set=checkpoint_every=1000", "--set=checkpoint_local_every=10"]
    running = machines(text, tmp_path, "fsdp=2", *often)
    while not list(tmp_path.glob("disk1/*/80-*/1.npz")):
        assert running[0].poll() is None, running[0].communicate()[0]
        time.sleep(0.02)
    for process in running:
        process.kill()
        process.communicate()
    assert not saved(tmp_path)
    said = said_by(machines(text, tmp_path, "tensor=2", *often))
    (step,) = map(int, re.findall(r"going on from step (\d+)", said[0]))
    assert step % 10 == 0 and 70 <= step < STEPS
    found = losses(tmp_path)
    assert list(found) == list(range(1, STEPS + 1))
    for near in range(step + 1, step + 6):  # Rounding differs, and grows.
        np.testing.assert_allclose(found[near], unbroken[near], rtol=1e-5)


@pytest.mark.slow
def test_what_one_process_cannot_read_both_give_up(unbroken, text, tmp_path):
    assert said_by(machines(text, tmp_path, "fsdp=2"))
    shutil.rmtree(tmp_path / "disk1")  # Half of the weights are nowhere else.
    newest = tmp_path / "checkpoints/150/state/ocdbt.process_1/d"
    for file in newest.iterdir():
        os.truncate(file, file.stat().st_size // 2)
    said = said_by(machines(text, tmp_path, "fsdp=2"))
    for text_ in said:
        assert "do not hold all of 150-" in text_
        assert "checkpoint 150" in text_ and "process(es) [1]" in text_
    assert "going on from step 140" in said[0]
    found = losses(tmp_path)
    np.testing.assert_allclose(list(found.values()), list(unbroken.values()), rtol=1e-5)


@pytest.mark.slow
def test_a_kill_during_the_last_write_leaves_nothing_missing(text, tmp_path):
    """The local disk holds the last step, the run's folder not yet."""
    local = f"--checkpoint_local_dir={tmp_path}/disk"
    run = command(text, tmp_path, local, "--steps=20", "--set=evaluate_every=20")
    for _ in range(20):  # Until a kill comes between the two writes.
        running = subprocess.Popen(run, cwd=ROOT, stdout=subprocess.DEVNULL)
        while not list(tmp_path.glob("disk/*/20-*/0.npz")):
            assert running.poll() is None
            time.sleep(0.0005)
        running.kill()
        running.wait()
        if not saved(tmp_path):
            break
        for folder in ("disk", "checkpoints"):
            shutil.rmtree(tmp_path / folder)
        for name in ("run.json", "metrics.jsonl"):
            (tmp_path / name).unlink()
    assert not saved(tmp_path)
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "step 20 comes from local disks" in done.stdout
    assert saved(tmp_path) == [20]
    rows = metrics.read(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "evaluation_loss" in row] == [20]


@pytest.mark.slow
def test_a_full_disk_ends_with_the_cause_and_the_run_goes_on_after(
    unbroken, text, tmp_path
):
    """Files may not grow beyond 64 KiB: the write fails as on a full disk."""
    launch = ["launch/local.sh", f"--log_dir={tmp_path}/logs", "--max_restarts=2", "2"]
    words = [*launch, "--", *command(text, tmp_path)]
    full = ["bash", "-c", 'trap "" XFSZ; ulimit -f 64; "$@"', "bash", *words]
    options = dict(cwd=ROOT, env=processes.environment(), capture_output=True)
    done = subprocess.run(full, text=True, timeout=200, **options)
    logs = "".join(path.read_text() for path in (tmp_path / "logs").glob("*.log"))
    assert done.returncode == 2, done.stderr
    assert "writing a checkpoint to" in logs and "make room" in logs
    assert "Traceback" not in logs and logs.count("\n") < 40, logs
    done = subprocess.run(words, timeout=200, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    found = losses(tmp_path)
    np.testing.assert_allclose(list(found.values()), list(unbroken.values()), rtol=1e-5)


STALL = """
import sys, time
from experiments.recipes import CATALOG
from meshpar.commands import run
from meshpar.checkpoint.checkpoints import Checkpoints

def stalled_storage(*_, **__):
    time.sleep(600)

setattr(Checkpoints, sys.argv.pop(1), stalled_storage)
run.start(CATALOG)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "call, section, limit_s",
    # The start also reads the data, which a busy machine does slowly.
    [slow("restore", "start", 10), ("save", "save", 3), slow("wait", "end", 3)],
)
def test_a_storage_that_stalls_ends_the_run_with_its_name(
    call, section, limit_s, tmp_path
):
    """Also in a single process, whose steps have no limit."""
    limit = [f"--set=watchdog.{section}={limit_s}", "--devices=1"]
    limit.append("--set=sample_tokens=0")
    run = ["--recipe=tiny", "--steps=2", f"--workdir={tmp_path}", *limit]
    done = subprocess.run(
        [sys.executable, "-c", STALL, call, *run],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 76, done.stderr
    assert f"process 0: {section} for " in done.stderr
    assert "storage may have stalled" in done.stderr
    assert "in stalled_storage" in done.stderr
