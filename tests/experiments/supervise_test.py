"""The supervisor: restarts, pauses, signals, and what it leaves behind."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments.supervision.restarts import FINAL, LONGEST_S, PORT_TAKEN, Restarts
from meshpar.multihost import HUNG
from meshpar.multihost.address import PortTakenError
from meshpar.runs.replica_check import DIVERGED, ReplicaError
from meshpar.runs.trainer import RESTART

ROOT = pathlib.Path(__file__).parents[2]


def supervise(tmp_path, script, *options):
    words = [sys.executable, "-m", "experiments.supervise", f"--log_dir={tmp_path}"]
    return subprocess.Popen(
        [*words, *options, "--", "bash", "-c", script.replace("HERE", str(tmp_path))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def is_running(pid):
    """Whether a process exists and is no zombie."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def pids(path, number):
    """The process ids that a script wrote, once there are that many."""
    assert wait_until(lambda: path.exists() and len(path.read_text().split()) == number)
    return [int(pid) for pid in path.read_text().split()]


STUBBORN = (
    'trap "" TERM; echo $$ >>HERE/pids; (trap "" TERM; echo $BASHPID >>HERE/pids; '
    "while :; do sleep 1; done) & while :; do sleep 1; done"
)


def test_no_process_is_left_when_the_supervisor_is_killed(tmp_path):
    running = supervise(tmp_path, STUBBORN, "--processes=2")
    started = pids(tmp_path / "pids", 4)
    assert all(map(is_running, started))
    running.kill()
    assert wait_until(lambda: not any(map(is_running, started)))
    running.communicate()


def test_no_process_is_left_when_its_guard_is_killed_as_well(tmp_path):
    running = supervise(tmp_path, "echo $$ >>HERE/pids; exec sleep 60", "--processes=2")
    started = pids(tmp_path / "pids", 2)
    children = pathlib.Path(f"/proc/{running.pid}/task/{running.pid}/children")
    (guard,) = {*map(int, children.read_text().split())} - {*started}
    os.kill(guard, signal.SIGKILL)
    running.kill()
    assert wait_until(lambda: not any(map(is_running, started)))
    running.communicate()


def test_grandchildren_end_with_their_process(tmp_path):
    script = 'sleep 60 & echo $! >>HERE/pids; sh -c "sleep 60" & echo $! >>HERE/pids'
    running = supervise(tmp_path, script)
    started = pids(tmp_path / "pids", 2)
    said = running.communicate(timeout=20)
    assert running.returncode == 0, said
    assert not any(map(is_running, started))


def test_a_third_signal_ends_processes_that_ignore_signals(tmp_path):
    running = supervise(tmp_path, STUBBORN.replace("TERM", "TERM INT"))
    started = pids(tmp_path / "pids", 2)
    for _ in range(3):
        running.terminate()
        time.sleep(0.3)
    assert running.wait(20) == 128 + signal.SIGKILL
    assert not any(map(is_running, started))
    running.communicate()


def test_a_signal_is_passed_on_and_ends_the_restarts(tmp_path):
    script = 'trap "exit 75" TERM; echo $$ >>HERE/pids; sleep 30 & wait'
    running = supervise(
        *(tmp_path, script, "--restarts=5"), f"--on_stopped=touch {tmp_path}/again"
    )
    pids(tmp_path / "pids", 1)
    running.terminate()
    assert running.wait(20) == 75
    assert (tmp_path / "again").exists()
    running.communicate()


def test_a_signal_in_the_pause_ends_the_run(tmp_path):
    running = supervise(tmp_path, "exit 76", "--restarts=5", "--backoff=50")
    assert any("in 50 s" in line for line in running.stderr)
    running.terminate()
    assert running.wait(10) == 76
    running.communicate()


def test_the_first_failure_is_on_record(tmp_path):
    (tmp_path / "run").mkdir()
    script = (
        "echo start >>HERE/n; echo 'Traceback of start' $(wc -l <HERE/n); "
        "echo $(wc -l <HERE/n) >$MESHPAR_PROGRESS; kill -SEGV $$ # --workdir=HERE/run"
    )
    words = ["--restarts=1", "--backoff=0", "--"]
    command = ["bash", "-c", script.replace("HERE", str(tmp_path)), "bash"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.supervise", f"--log_dir={tmp_path}"]
        + [*words, *command, f"--workdir={tmp_path}/run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 128 + signal.SIGSEGV
    first, second = (tmp_path / "run/failures.txt").read_text().split("\n\n")[:2]
    assert "code 139 (SIGSEGV) after step 1" in first and "of start 1" in first
    assert "after step 2" in second and "of start 2" in second
    assert "of start 1" not in second


def test_a_run_goes_on_when_its_log_is_on_a_full_disk(tmp_path):
    (tmp_path / "all.log").symlink_to("/dev/full")
    running = supervise(
        tmp_path, "for n in 1 2 3; do echo $n || exit 3; sleep 0.2; done"
    )
    said = running.communicate(timeout=20)
    assert running.returncode == 0 and said[0].split() == ["1", "2", "3"], said


def test_starts_that_finish_no_step_are_not_failures_of_one_step(tmp_path):
    """A run writes its section beside the last step, which is 0 before the first."""
    script = 'echo "0 start" >$MESHPAR_PROGRESS; exit 76'
    running = supervise(tmp_path, script, "--restarts=2", "--backoff=0")
    said = running.communicate(timeout=20)[1]
    assert running.returncode == 76 and "after 2 restarts" in said
    script = 'echo "7 save" >$MESHPAR_PROGRESS; exit 76'
    running = supervise(tmp_path, script, "--restarts=2", "--backoff=0")
    assert "twice after step 7" in running.communicate(timeout=20)[1]


def test_a_taken_port_is_tried_anew_and_every_start_has_its_own_token(tmp_path):
    script = (
        "echo $MESHPAR_COORDINATOR >>HERE/ports; echo $MESHPAR_TOKEN >>HERE/tokens; "
        "(($(wc -l <HERE/ports) == 3)) || exit 74"
    )
    running = supervise(tmp_path, script, "--processes=1", "--backoff=0.01")
    said = running.communicate(timeout=20)
    assert running.returncode == 0, said
    assert len(set((tmp_path / "ports").read_text().split())) == 3
    found = (tmp_path / "tokens").read_text().split()
    assert len(set(found)) == 3 and min(map(len, found)) >= 32


def test_pauses_double_while_no_step_is_finished():
    restarts = Restarts(most=50, backoff_s=1.0)
    pauses = [restarts.pause(75, 7) for _ in range(50)]
    assert pauses[:7] == [1, 2, 4, 8, 16, 32, LONGEST_S] and sum(pauses) > 2600
    assert restarts.pause(75, 8) is None and restarts.done == 50
    restarts = Restarts(most=50, backoff_s=1.0)
    assert [restarts.pause(137, step) for step in (1, 2, 3, None)] == [1, 1, 1, 2]


def test_an_error_in_the_program_is_tried_again_once_after_steps():
    restarts = Restarts(most=50, backoff_s=1.0)
    assert (
        restarts.pause(1, None) is None and "before its first step" in restarts.why_not
    )
    assert restarts.pause(1, 7) == 1.0  # Such as a network that was away.
    assert restarts.pause(1, 9) == 1.0
    assert restarts.pause(1, 9) is None and "twice after step 9" in restarts.why_not


def test_a_port_that_is_always_taken_ends_the_run():
    restarts = Restarts(most=0, backoff_s=1.0)
    pauses = [restarts.pause(PORT_TAKEN, None) for _ in range(6)]
    assert pauses == [1.0] * 5 + [None]


def test_exit_codes_have_one_meaning():
    assert PORT_TAKEN == PortTakenError.exit_code
    assert len({HUNG, RESTART, DIVERGED, PORT_TAKEN, *FINAL}) == 4 + len(FINAL)
    assert ReplicaError.exit_code == DIVERGED
    for code in (HUNG, RESTART, DIVERGED):
        assert Restarts(1, 0.0).pause(code, 1) == 0


@pytest.mark.parametrize(
    "words, says",
    [
        (["--restarts=x", "--", "true"], "'x' is not a whole number"),
        (["--backoff=nan", "--", "true"], "invalid _seconds value: 'nan'"),
        (["--restart=1", "--", "true"], "unrecognized arguments: --restart=1"),
        (["--restarts=1"], "write -- and the command"),
        (["true"], "unrecognized arguments: true"),
        (["--", "/no/such/program"], "cannot start /no/such/program"),
        (["--log_dir=/dev/null/logs", "--", "true"], "cannot write logs to"),
    ],
)
def test_what_cannot_be_supervised_is_an_error_of_the_user(words, says, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "experiments.supervise", f"--log_dir={tmp_path}"]
        + words,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2 and says in done.stderr, done.stderr


def test_the_supervisor_needs_no_jax():
    script = (
        "import sys, experiments.supervise; "
        "print({'jax', 'numpy', 'absl', 'meshpar'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "set()\n", done.stderr
