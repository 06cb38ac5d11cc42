"""Hogwild: as good as serial on sparse rows, its penalty on dense ones, and kills."""

import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import scipy.sparse as sp

from meshpar.errors import MeshparError
from meshpar.methods.hogwild import training as hogwild

ROOT = pathlib.Path(__file__).parents[2]


def problem(num_rows, num_features, density, seed=0):
    """Rows with squared norms of about 20, and labels from a random model."""
    rng = np.random.default_rng(seed)
    shape = num_rows, num_features
    rows = sp.random_array(shape, density=density, format="csr", rng=rng)
    rows.data = rng.normal(size=len(rows.data)) * (20 / density / num_features) ** 0.5
    truth = rng.normal(size=num_features)
    chance = 1 / (1 + np.exp(-(rows @ truth)))
    return rows, np.where(rng.random(num_rows) < chance, 1.0, -1.0)


def gap(rows, labels, processes, **settings):
    """Excess of the objective over that of one process, and the share of lost updates.

    The rows are trained on in another order, so that the excess may be negative.
    """
    one, many = (
        hogwild.train(rows, labels, hogwild.Settings(processes=count, **settings))
        for count in (1, processes)
    )
    assert one.lost < 1e-12
    values = [hogwild.objective(rows, labels, r.weights, 1.0) for r in (one, many)]
    return values[1] / values[0] - 1, many.lost


def test_one_process_reaches_the_minimum():
    rows, labels = problem(500, 300, 0.05)
    settings = hogwild.Settings(processes=1, passes=40, learning_rate=0.1)
    weights = hogwild.train(rows, labels, settings).weights
    found = hogwild.objective(rows, labels, weights, 1.0)
    slopes = -labels / (1 + np.exp(labels * (rows @ weights)))
    gradient = rows.T @ slopes + weights
    # The objective is 1-strongly convex, so its minimum is at most this far below.
    assert gradient @ gradient / 2 < 1e-2 * found
    assert found < 0.7 * hogwild.objective(rows, labels, 0 * weights, 1.0)


def test_two_processes_are_as_good_as_one_on_sparse_rows():
    rows, labels = problem(4000, 20_000, 0.001)
    excess, lost = gap(rows, labels, 2, passes=8, learning_rate=0.05)
    assert abs(excess) < 0.01 and lost < 0.01


@pytest.mark.slow
def test_dense_rows_lose_updates_and_sparse_rows_do_not():
    settings = dict(passes=8, learning_rate=0.05)
    excess, lost = gap(*problem(4000, 20_000, 0.001), 4, **settings)
    assert abs(excess) < 0.01
    dense_excess, dense_lost = gap(*problem(4000, 1000, 1.0), 4, **settings)
    assert dense_lost > 5 * lost and dense_excess > 0.01


def test_an_update_that_another_process_overwrites_counts_as_lost():
    arrays = {
        "weights": np.array([3.0, 0.0]),
        "totals": np.array([[4.0, 0.0], [-1.0, 2.0]]),
        "sizes": np.array([4.0, 4.0]),
        "seconds": np.array([1.0, 2.0]),
    }
    assert hogwild._result(arrays).lost == 0.25
    assert hogwild._result(arrays).seconds == 2


SCRIPT = """
import numpy as np, scipy.sparse as sp
from meshpar.methods.hogwild import training as hogwild

if __name__ == "__main__":
    rows = sp.csr_array(np.eye(1000))
    hogwild.train(rows, np.ones(1000), hogwild.Settings(processes=2, passes=10**6))
"""


def segments_of(pid):
    """Shared memory that a process has mapped, and that still exists."""
    try:
        maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return set(re.findall(r"/dev/shm/psm_\w+$", maps, re.M))


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_is_left_when_the_parent_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, str(script)], env=environment)
    children = pathlib.Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    try:
        segments = wait_for(lambda: segments_of(parent.pid))
        # The resource tracker is the third child.
        pids = wait_for(lambda: len(c := children.read_text().split()) == 3 and c)
        wait_for(lambda: sum(map(bool, map(segments_of, pids))) == 2)
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not any(map(os.path.exists, segments)))
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_worker_is_an_error_and_leaves_nothing():
    rows, labels = problem(1000, 1000, 0.01)
    before, killed = segments_of(os.getpid()), []

    def kill_one():
        wait_for(multiprocessing.active_children)
        child = multiprocessing.active_children()[0]
        wait_for(lambda: segments_of(child.pid))
        killed.extend(segments_of(os.getpid()) - before)
        os.kill(child.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_one)
    thread.start()
    with pytest.raises(hogwild.WorkerLostError, match="code -9.*run the same command"):
        hogwild.train(rows, labels, hogwild.Settings(processes=2, passes=10**6))
    thread.join()
    assert killed and not any(map(os.path.exists, killed))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(processes=0), "processes=0: use"),
        (dict(processes=2.5), "processes=2.5: use"),
        (dict(passes=-1), "passes=-1: use"),
        (dict(learning_rate=0), "learning_rate=0: use"),
        (dict(decay=float("nan")), "decay=nan: use"),
        (dict(l2=-1), "l2=-1: use"),
        (dict(processes=4), "processes=4 for 3 rows: use"),
    ],
)
def test_settings_that_cannot_be(settings, words):
    with pytest.raises(MeshparError, match=words):
        hogwild.train(sp.csr_array(np.eye(3)), np.ones(3), hogwild.Settings(**settings))


def test_labels_are_signs():
    for labels in (np.ones(2), np.array([0.0, 1.0, 1.0])):
        with pytest.raises(MeshparError, match="give a label of 1 or -1"):
            hogwild.train(sp.csr_array(np.eye(3)), labels, hogwild.Settings())


def test_too_little_shared_memory_is_an_error(monkeypatch):
    full = type("Room", (), {"f_bavail": 1, "f_frsize": 4096})
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    monkeypatch.setattr(os.path, "isdir", lambda path: True)
    with pytest.raises(MeshparError, match="shm has 0 MB free: give it more"):
        hogwild.train(sp.csr_array(np.eye(9**3)), np.ones(9**3), hogwild.Settings())
