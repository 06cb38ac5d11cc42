"""Real processes: servers and islands in Ray, killed in mid-run."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run(what, timeout):
    pytest.importorskip("ray", reason='needs pip install -e ".[islands]"')
    script = ROOT / "tests" / "support" / "killed_in_ray.py"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, script, what],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-4000:]
    return done.stdout


def test_a_server_is_killed_and_no_answered_push_is_lost():
    run("server", 240)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a second loopback address")
def test_ray_listens_on_the_loopback_alone():
    run("ports", 120)


@pytest.mark.slow
def test_islands_and_servers_are_killed_and_training_goes_on():
    print(run("islands", 900))
