"""Real processes: servers and islands in Ray, killed in mid-run."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow
"""Simulated and threaded islands have the same store and laws by default."""

CACHE = "JAX_COMPILATION_CACHE_DIR"
ROOT = pathlib.Path(__file__).parents[2]


def run(timeout, *cases, script="killed_in_ray.py"):
    """The words and the errors of a process that ran these cases in one Ray."""
    pytest.importorskip("ray", reason='needs pip install -e ".[islands]"')
    script = ROOT / "tests" / "support" / script
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    # With a cache of jax's, islands do not share compiled programs.
    environment = {k: v for k, v in os.environ.items() if k != CACHE}
    return subprocess.run(
        [sys.executable, script, *cases],
        env=environment | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


CASES = ["server", "aggregates", "ahead", "lost", "birth", "trials_of_islands"]
IN_LINUX = ["ports", "zygote"]  # The last one kills the process that forks workers.


@pytest.fixture(scope="module")
def ended():
    """All cases, one after the other: to start Ray takes longer than most of them."""
    return run(400, *CASES, *(IN_LINUX if sys.platform == "linux" else []))


def check(ended, case):
    assert f"{case} done" in ended.stdout, ended.stderr[-4000:]


def test_a_server_is_killed_and_no_answered_push_is_lost(ended):
    check(ended, "server")


def test_a_server_is_killed_and_no_aggregate_is_lost_or_doubled(ended):
    check(ended, "aggregates")


def test_a_checkpoint_does_not_wait_for_an_island_that_waits_for_others(ended):
    check(ended, "ahead")


def test_a_checkpoint_waits_for_a_new_server_and_a_lost_store_is_said(ended):
    check(ended, "lost")


def test_an_elastic_island_begins_is_killed_and_resumes_as_its_recurrence(ended):
    check(ended, "birth")


def test_a_trial_whose_process_is_killed_alone_is_run_again(ended):
    check(ended, "trials_of_islands")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a zygote")
def test_workers_are_forked_and_nothing_stays_behind(ended):
    check(ended, "zygote")
    assert ended.returncode == 0
    (line,) = (x for x in ended.stdout.splitlines() if x.startswith("left"))
    _, folder, *pids = line.split()
    deadline = time.monotonic() + 30
    while left := [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"processes {left} of {line} live on"
        time.sleep(0.2)
    assert not pathlib.Path(folder).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="needs a second loopback address")
def test_ray_listens_on_the_loopback_alone(ended):
    check(ended, "ports")


def test_islands_and_servers_are_killed_and_training_goes_on():
    done = run(900, "islands")
    print(done.stdout)
    check(done, "islands")


def test_owners_budgets_filters_and_versions_equal_plain_loops():
    done = run(400, script="islands_in_ray.py")
    check(done, "owners")
    check(done, "filters")


def test_islands_of_every_algorithm_begin_as_their_recurrence():
    check(run(900, "births"), "births")
