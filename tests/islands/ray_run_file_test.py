"""Islands in Ray: a run of a file, and what is lost."""

import subprocess
import sys

import pytest
from support.processes import environment
from support.tiny_runs import ROOT

from meshpar.islands.coordinator import RangeLostError
from meshpar.islands.host import StoreLostError
from meshpar.multihost.watchdog import HUNG

ray = pytest.importorskip("ray", reason='needs pip install -e ".[islands]"')


@pytest.mark.slow
def test_a_run_of_a_file_trains_in_processes_and_ray_says_nothing(tmp_path):
    words = ["--recipe=tests/support/own_run.py:net", "--platform=cpu"]
    words += ["--optimizer_mode=islands", "--steps=4", f"--workdir={tmp_path}/run"]
    words += ["--layout=data=1", "--set=islands.workers=2", "--set=islands.host=ray"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.run", *words],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 4/4" in done.stdout and not done.stderr


def test_a_store_whose_processes_are_gone_lets_the_run_start_again(monkeypatch):
    from meshpar.islands import ray_client

    def get(ref, timeout):
        raise ref

    monkeypatch.setattr(ray_client.ray, "get", get)
    with pytest.raises(StoreLostError, match="run the same command again") as caught:
        ray_client.result(ray.exceptions.ActorDiedError())
    assert caught.value.exit_code == HUNG
    gone = RangeLostError("range weights/0: all servers that held it are gone")
    with pytest.raises(StoreLostError, match="weights/0: all servers .* goes on from"):
        ray_client.result(ray.exceptions.RayTaskError("view", "", gone))
    with pytest.raises(ValueError, match="a user's error"):
        ray_client.result(ValueError("a user's error"))
