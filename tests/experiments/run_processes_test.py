"""Runs in processes of their own: kills, launchers, several processes."""

import os
import re
import signal
import subprocess
import time

import numpy as np
import pytest
from support import processes
from support.marks import slow
from support.tiny_runs import ROOT, command, config, losses, stop_after, train

from meshpar import layouts
from meshpar.runs import goodput
from meshpar.runs.replica_check import DIVERGED
from meshpar.runs.trainer import RESTART


@pytest.mark.slow
def test_kill_9_loses_only_the_steps_since_the_checkpoint(unbroken, text, tmp_path):
    """The metrics log may be ahead of the checkpoint, and its last line torn."""
    process = subprocess.Popen(command(text, tmp_path), cwd=ROOT)
    log = tmp_path / "metrics.jsonl"
    while max(losses(tmp_path), default=0) < 6 and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    with log.open("a") as file:
        file.write('{"step": 9, "lo')
    assert train(config(text, tmp_path)) == 0
    found = losses(tmp_path)
    assert list(found) == list(range(1, 13))
    np.testing.assert_allclose(
        list(found.values()), list(unbroken[0].values()), rtol=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "num, layout",
    [
        (2, "data=2,fsdp=2"),
        slow(2, "data=2,fsdp=2,tensor=2"),
        slow(4, "pipe=2,data=2,fsdp=2,microbatches=2"),
    ],
)
def test_real_processes_go_on_where_one_stopped(
    unbroken, text, tmp_path, monkeypatch, num, layout
):
    """launch/local.sh: one mesh over all, the losses of the single process."""
    workdir, logs = tmp_path / "run", tmp_path / "logs"
    with monkeypatch.context() as patch:
        stop_after(patch, 4, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert train(config(text, workdir), "fsdp=2") == RESTART
    stopped = max(losses(workdir))
    launch = ["launch/local.sh", f"--log_dir={logs}", str(num), "--"]
    run = command(text, workdir, f"--layout={layout}")
    done = subprocess.run(
        [*launch, *run],
        cwd=ROOT,
        env=processes.environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    devices = layouts.parse(layout).num_devices
    assert f"on {devices} cpu device(s), {num} process(es)" in done.stdout
    assert f"going on from step {stopped}" in done.stdout
    assert (logs / "0.log").exists() and (logs / "1.log").exists()
    found = losses(workdir)
    assert list(found) == list(range(1, 13))
    np.testing.assert_allclose(
        list(found.values()), list(unbroken[0].values()), rtol=1e-5
    )
    starts = goodput.read(workdir).starts
    assert [start.facts["processes"] for start in starts] == [1, num]
    assert [start.ended for start in starts] == ["stopped", "done"]
    assert [start.num_steps for start in starts] == [stopped, 12 - stopped]


@pytest.mark.slow
def test_a_flipped_bit_in_one_of_two_processes_is_named_and_ends_both(text, tmp_path):
    """Exit code 77; the same command goes on from the checkpoint before."""
    launch = ["launch/local.sh", f"--log_dir={tmp_path}/logs", "2", "--"]
    run = command(text, tmp_path / "run", "--layout=data=4", "--check_replicas=3")
    run.append("--set=checkpoint_every=4")
    planted = [run[0], "tests/support/planted_flips.py", *run[3:]]
    codes, output = [], ""
    for words in (planted, run):
        done = subprocess.run(
            [*launch, *words],
            cwd=ROOT,
            env=processes.environment() | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=200,
        )
        codes.append(done.returncode)
        output += done.stdout + done.stderr
    assert codes == [DIVERGED, 0], output
    assert re.search(r"error: step 6: .*device \d+ of process 1 is wrong", output)
    assert "going on from step 4" in output


@pytest.mark.slow
def test_launch_local_names_the_process_with_another_config(text, tmp_path):
    """One process of three has another seed: all stop before the first collective."""
    logs = tmp_path / "logs"
    script = 'exec "$@" --seed=$((MESHPAR_PROCESS_ID == 1 ? 7 : 0))'
    run = command(text, tmp_path / "run", "--layout=data=3", "--batch_size=12")
    launch = ["launch/local.sh", f"--log_dir={logs}", "3", "--", "bash", "-c", script]
    done = subprocess.run(
        [*launch, "bash", *run], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 2, done.stdout + done.stderr
    said = [(logs / f"{process}.log").read_text() for process in range(3)]
    named = ["config: process 1 has" in log and "seed=7" in log for log in said]
    # The launcher stops the others when the first has ended, perhaps before they speak.
    told = r"process (\d) ended with code 2; stopping the others"
    stopped = re.search(told, done.stdout + done.stderr)
    assert all(named) or (stopped and named[int(stopped[1])]), said
    assert not any(
        "error" in log for log, own in zip(said, named, strict=True) if not own
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_launch_local_returns_the_code_of_the_process_that_fails(tmp_path):
    script = "if ((MESHPAR_PROCESS_ID == 1)); then exit 3; fi; sleep 60"
    launch = ["launch/local.sh", f"--log_dir={tmp_path}", "2", "--", "bash", "-c"]
    began = time.monotonic()
    done = subprocess.run([*launch, script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 3
    assert "process 1 ended with code 3" in done.stderr
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_launch_local_passes_a_signal_on_and_the_run_saves(text, tmp_path):
    workdir = tmp_path / "run"
    launch = ["launch/local.sh", f"--log_dir={tmp_path}/logs", "2", "--"]
    run = command(text, workdir, "--layout=fsdp=2", "--steps=2000")
    run += ["--set=evaluate_every=2000"]
    process = subprocess.Popen(
        [*launch, *run],
        cwd=ROOT,
        env=processes.environment(),
        stdout=subprocess.DEVNULL,
    )
    while max(losses(workdir), default=0) < 3 and process.poll() is None:
        time.sleep(0.05)
    process.terminate()
    assert process.wait(200) == RESTART
    steps = [int(p.name) for p in (workdir / "checkpoints").iterdir()]
    assert max(steps) == max(losses(workdir)) >= 3
