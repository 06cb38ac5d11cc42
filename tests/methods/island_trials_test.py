"""Trials by threads: their order, how many run at once, and what goes wrong."""

import threading

import pytest

from meshpar.errors import MeshparError
from meshpar.methods.random_search import island_trials

VALUES = {"rate": [0.1, 0.2, 0.3, 0.4, 0.5], "depth": [1, 2, 3, 4, 5]}


def test_outcomes_keep_the_order_of_the_values():
    later, seen = threading.Event(), []

    def run(values):
        if values["depth"] == 1:
            assert later.wait(10)  # The first trial ends last.
        seen.append(values["depth"])
        if len(seen) == 4:
            later.set()
        return values["rate"] * values["depth"]

    found = island_trials.search(run, VALUES, workers=2)
    assert found == [r * d for r, d in zip(*VALUES.values(), strict=True)]
    assert sorted(seen) == VALUES["depth"] and seen[-1] == 1


def test_at_most_so_many_run_at_once():
    together, most = threading.Semaphore(2), []

    def run(values):
        assert together.acquire(blocking=False)
        most.append(values)
        together.release()

    island_trials.search(run, {"rate": list(range(50))}, workers=2)
    assert len(most) == 50


def test_an_error_of_a_trial_ends_the_search():
    begun = []

    def run(values):
        begun.append(values["depth"])
        raise KeyError("no such rate")

    with pytest.raises(KeyError, match="no such rate"):
        island_trials.search(run, VALUES, workers=1)
    assert len(begun) < len(VALUES["depth"])


def test_without_ray_its_processes_are_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MeshparError, match=r'pip install "meshpar\[islands\]"'):
        island_trials.search(lambda values: None, VALUES, host="ray")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"values": {"a": [1], "b": [1, 2]}}, "'b': 2"),
        ({"values": {"a": []}}, "give as many values of each"),
        ({"values": {}}, "give as many values of each"),
        ({"host": "cloud"}, "use one of"),
        ({"workers": 0}, "workers=0"),
        ({"retries": -1}, "retries=-1"),
    ],
)
def test_bad_arguments_are_refused(changes, words):
    arguments = {"values": VALUES, **changes}
    with pytest.raises(MeshparError, match=words):
        island_trials.search(lambda values: None, **arguments)
