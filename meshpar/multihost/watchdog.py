"""A watchdog: ends a run of many processes that hangs, and names the stalled ones.

Each process reports its last finished step, and that it is alive, to the key-value
store of jax.distributed. A thread compares the time since the last step with the median
step time. A step that takes far longer ends the process with exit code `HUNG`, and a
launcher starts the run again from its last checkpoint. The first step is not watched,
as the time to compile cannot be predicted.
"""

import contextlib
import itertools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable

import jax

from meshpar import compat

HUNG = 76
"""Exit code of a process whose run hung."""

_PREFIX = "meshpar/watchdog"
_FACTOR = 20
"""A step that takes this many times the median counts as hung."""


class Watchdog:
    """Watches the steps of this process; does nothing in a single process."""

    def __init__(
        self,
        at_least_s: float,
        end: Callable[[int], None] = os._exit,
        poll_s: float = 1.0,
    ):
        """Makes a watchdog, which is paused until the first step has finished.

        Args:
          at_least_s: shortest time that counts as hung, in seconds; 0 for never.
          end: ends this process with an exit code.
          poll_s: interval of the checks, in seconds.
        """
        self._at_least, self._end, self._poll = at_least_s, end, poll_s
        self._client = compat.coordination_client()
        self._lock = threading.Lock()
        self._step_times: list[float] = []
        self._step, self._last = 0, None
        self._stopped = threading.Event()

    def __enter__(self):
        if self._client is not None and self._at_least > 0:
            for loop in (self._watch, self._beat):
                threading.Thread(target=loop, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._stopped.set()

    def finished(self, step: int) -> None:
        """Notes that a step's results have been read back from the devices."""
        with self._lock:
            now = time.monotonic()
            if self._last is not None:
                self._step_times = [*self._step_times[-99:], now - self._last]
            self._step, self._last = step, now

    def pause(self) -> None:
        """Stops watching until the next step: evaluating or saving may take long."""
        with self._lock:
            self._last = None

    def resume(self) -> None:
        """Watches again, starting now."""
        with self._lock:
            self._last = time.monotonic() if self._step_times else None

    def limit(self) -> float:
        """How long a step may take, in seconds."""
        median = statistics.median(self._step_times) if self._step_times else 0.0
        return max(self._at_least, _FACTOR * median)

    def _watch(self) -> None:
        """Ends the process when a step takes too long."""
        while not self._stopped.wait(self._poll):
            with self._lock:
                waited = 0 if self._last is None else time.monotonic() - self._last
                step, limit = self._step, self.limit()
            if waited > limit:
                # In a thread, as the store hangs if the process that serves it does.
                report = threading.Thread(target=self._report, args=(step, waited))
                report.daemon = True
                report.start()
                report.join(10 + 5 * self._poll)
                self._end(HUNG)
                return

    def _beat(self) -> None:
        """Reports at intervals that this process is alive; may hang with the store."""
        key = f"{_PREFIX}/{jax.process_index()}"
        for beat in itertools.count():
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                text = f"{self._step} {beat}"
                self._client.key_value_set(key, text, allow_overwrite=True)
            if self._stopped.wait(self._poll):
                return

    def _heartbeats(self) -> dict[int, tuple[int, int]]:
        """{process: (step, beat)} of the processes that have reported."""
        heartbeats = {}
        for process in range(jax.process_count()):
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                text = self._client.key_value_try_get(f"{_PREFIX}/{process}")
                step, beat = text.split()
                heartbeats[process] = int(step), int(beat)
        return heartbeats

    def _report(self, step: int, waited: float) -> None:
        head = f"watchdog: no step for {waited:.0f} s after step {step}"
        print(f"{head}; this process ends", file=sys.stderr, flush=True)
        before = self._heartbeats()
        time.sleep(4 * self._poll)
        after = self._heartbeats()
        reached = {process: step for process, (step, _) in after.items()}
        processes = range(jax.process_count())
        stalled = [p for p in processes if after.get(p) == before.get(p)]
        behind = [p for p in reached if reached[p] < max(reached.values())]
        print(
            f"{head}: steps reached {reached}; stalled process(es): "
            f"{stalled or 'none'}; behind: {behind or 'none'}",
            file=sys.stderr,
            flush=True,
        )
