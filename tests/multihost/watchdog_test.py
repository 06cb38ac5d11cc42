"""The watchdog ends a run that hangs, and names the stalled processes."""

import threading
import time

from meshpar.multihost import HUNG, Watchdog


class Store:
    """The key-value store of jax.distributed, with another process at step 3."""

    def __init__(self):
        self.values = {"meshpar/watchdog/1": "3 7"}

    def key_value_set(self, key, value, allow_overwrite):
        assert allow_overwrite
        self.values[key] = value

    def key_value_try_get(self, key):
        return self.values[key]


def test_the_watchdog_names_who_is_behind(monkeypatch, capsys):
    ended = threading.Event()
    codes = []

    def end(code):
        codes.append(code)
        ended.set()

    monkeypatch.setattr("meshpar.compat.coordination_client", Store)
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with Watchdog(0.3, end, poll_s=0.02) as watchdog:
        for step in range(1, 6):
            watchdog.finished(step)
            time.sleep(0.01)
        watchdog.pause()
        time.sleep(0.6)
        assert not codes  # Paused: compiling, evaluating or saving may take long.
        watchdog.finished(6)
        assert ended.wait(10)
    assert codes == [HUNG]
    report = capsys.readouterr().err
    assert "after step 6" in report and "steps reached {0: 6, 1: 3}" in report
    assert "stalled process(es): [1]" in report and "behind: [1]" in report


def test_the_limit_of_the_watchdog_is_20_times_the_median():
    watchdog = Watchdog(0.001)
    watchdog._step_times = [1.0, 2.0, 30.0]
    assert watchdog.limit() == 40
