"""A stop signal at the start of two processes, before there is a step to save."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest
from support import processes

ROOT = pathlib.Path(__file__).parents[2]

WAIT = """
import time
from experiments.recipes import CATALOG
from meshpar.commands import run

def reads_its_data_slowly(*_, **__):
    print("reading", flush=True)
    time.sleep(600)

run.Trainer = reads_its_data_slowly
run.start(CATALOG)
"""


@pytest.mark.slow
def test_a_stop_signal_at_the_start_ends_all_processes(tmp_path):
    """The service of jax for preemption would keep the signal for itself."""
    launch = ["launch/local.sh", f"--log_dir={tmp_path}", "--max_restarts=3", "2", "--"]
    run = [sys.executable, "-c", WAIT, "--recipe=tiny", "--layout=fsdp=2"]
    running = subprocess.Popen([*launch, *run], cwd=ROOT, env=processes.environment())
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    try:
        while not all(log.exists() and "reading" in log.read_text() for log in logs):
            assert running.poll() is None
            time.sleep(0.05)
        running.terminate()
        assert running.wait(30) == 128 + signal.SIGTERM
    finally:
        running.kill()
