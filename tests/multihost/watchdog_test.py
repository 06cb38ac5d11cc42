"""The watchdog ends a run that hangs, and names the stalled processes."""

import threading
import time

import pytest

from meshpar.errors import MeshparError
from meshpar.multihost import HUNG, Watchdog
from meshpar.multihost import watchdog as watchdogs


class Store:
    """The key-value store of jax.distributed, with another process at step 3."""

    def __init__(self):
        self.values = {"meshpar/watchdog/1": "3 7 save"}

    def key_value_set(self, key, value, allow_overwrite):
        assert allow_overwrite
        self.values[key] = value

    def key_value_try_get(self, key):
        return self.values[key]


class Ended:
    """Stands in for the end of this process."""

    def __init__(self):
        self.codes, self._event = [], threading.Event()

    def __call__(self, code):
        self.codes.append(code)
        self._event.set()

    def wait(self):
        return self._event.wait(10)


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr("meshpar.compat.coordination_client", lambda: store)
    monkeypatch.setattr("jax.process_count", lambda: 2)
    return store


def test_the_watchdog_names_who_is_behind(store, capfd):
    end = Ended()
    with Watchdog(0.3, end, poll_s=0.02) as watchdog:
        for step in range(1, 6):
            watchdog.finished(step)
            time.sleep(0.01)
        watchdog.pause()
        time.sleep(0.6)
        assert not end.codes  # Paused.
        watchdog.finished(6)
        assert end.wait()
    assert end.codes == [HUNG]
    report = capfd.readouterr().err
    assert "after step 6" in report and "steps reached {0: 6, 1: 3}" in report
    assert "sections {0: 'step', 1: 'save'}" in report
    assert "stalled process(es): [1]" in report and "behind: [1]" in report
    assert store.values["meshpar/watchdog/dump"] == "0"


@pytest.mark.parametrize(
    "section", [name for name in watchdogs.SECTIONS if name != watchdogs.STEP]
)
def test_every_section_has_a_limit_of_its_own_and_dumps_the_stacks(section, capfd):
    """In a single process, without a store."""
    end = Ended()
    others = {name: 0.1 for name in watchdogs.SECTIONS} | {section: 0.8}

    def wait_for_storage():
        assert end.wait()

    with Watchdog(0, end, poll_s=0.02, limits=others) as watchdog:
        watchdog.enter(section)
        time.sleep(0.4)
        assert not end.codes
        wait_for_storage()
    assert end.codes == [HUNG]
    report = capfd.readouterr().err
    assert f"process 0: {section} for 1 s" in report
    assert watchdogs.SECTIONS[section] in report and "the limit is 0.8 s" in report
    assert "wait_for_storage" in report  # The stack of the thread that stands.


def test_sections_one_after_the_other_are_timed_apart():
    end = Ended()
    limits = {watchdogs.SAVE: 1.0, watchdogs.EVALUATION: 1.0}
    with Watchdog(0, end, poll_s=0.02, limits=limits) as watchdog:
        for section in (watchdogs.SAVE, watchdogs.EVALUATION, watchdogs.SAVE):
            watchdog.enter(section)
            time.sleep(0.4)
        watchdog.finished(1)
        time.sleep(1.2)  # A step of a single process has no limit.
    assert not end.codes


def test_a_process_dumps_its_stacks_when_another_one_asks(store, capfd):
    with Watchdog(0, Ended(), poll_s=0.02) as watchdog:
        watchdog.enter(watchdogs.SAVE)
        store.values["meshpar/watchdog/dump"] = "1"
        time.sleep(0.3)
    report = capfd.readouterr().err
    assert "process 0: save for" in report and "process 1 has stopped" in report
    assert report.count("test_a_process_dumps_its_stacks") == 1


def test_the_time_in_which_a_process_is_suspended_does_not_count(monkeypatch):
    end, jump = Ended(), []
    clock = time.monotonic
    monkeypatch.setattr(watchdogs.time, "monotonic", lambda: clock() + sum(jump))
    with Watchdog(0, end, poll_s=0.02, limits={watchdogs.SAVE: 0.5}) as watchdog:
        watchdog.enter(watchdogs.SAVE)
        time.sleep(0.1)
        jump.append(100.0)
        time.sleep(0.1)
        assert not end.codes
        assert end.wait()


def test_the_limit_of_the_watchdog_is_20_times_the_median():
    watchdog = Watchdog(0.001)
    watchdog._step_times = [1.0, 2.0, 30.0]
    assert watchdog.limit() == 40


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, float("inf")])
def test_a_limit_that_is_no_time_is_an_error(seconds):
    with pytest.raises(MeshparError, match="use seconds, or 0"):
        Watchdog(seconds)
    with pytest.raises(MeshparError, match="save=.*use seconds, or 0"):
        Watchdog(1, limits={"save": seconds})


def test_every_change_of_step_and_section_is_noted():
    noted = []
    watchdog = Watchdog(0, note=lambda *change: noted.append(change))
    watchdog.enter(watchdogs.START)
    watchdog.finished(7)
    watchdog.enter(watchdogs.SAVE)
    watchdog.resume()
    assert noted == [(0, "start"), (7, "step"), (7, "save"), (7, "first_step")]
