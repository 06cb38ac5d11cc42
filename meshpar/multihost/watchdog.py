"""A watchdog: a run of many processes that stands still ends, and says who is missing.

Each process reports to the key-value store of jax.distributed which step it has
finished, and that it is alive. A thread compares the time since the last step with the
median; a step that takes far longer ends the process with `HUNG`, after which a
launcher starts the run again from its last checkpoint. The first step is not watched:
nobody knows how long compiling takes.
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
"""Exit code of a process whose run stood still."""

_PREFIX = "meshpar/watchdog"
_FACTOR = 20
"""A step that takes this many times the median stands still."""


class Watchdog:
    """Watches the steps of this process; does nothing in a single process."""

    def __init__(
        self,
        at_least_s: float,
        end: Callable[[int], None] = os._exit,
        poll_s: float = 1.0,
    ):
        """Makes a watchdog, which sleeps until the first step.

        Args:
          at_least_s: shortest time that counts as standing still, in seconds; 0 never.
          end: ends this process with an exit code.
          poll_s: how often it looks, in seconds.
        """
        self._at_least, self._end, self._poll = at_least_s, end, poll_s
        self._client = compat.coordination_client()
        self._lock = threading.Lock()
        self._seconds: list[float] = []
        self._step, self._last = 0, None
        self._stopped = threading.Event()

    def __enter__(self):
        if self._client is not None and self._at_least > 0:
            for work in (self._watch, self._beat):
                threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._stopped.set()

    def finished(self, step: int) -> None:
        """Notes that a step has been read back from the devices."""
        with self._lock:
            now = time.monotonic()
            if self._last is not None:
                self._seconds = [*self._seconds[-99:], now - self._last]
            self._step, self._last = step, now

    def pause(self) -> None:
        """Sleeps until the next step: what comes now may take long."""
        with self._lock:
            self._last = None

    def resume(self) -> None:
        """Watches again, from now on."""
        with self._lock:
            self._last = time.monotonic() if self._seconds else None

    def limit(self) -> float:
        """How long a step may take, in seconds."""
        median = statistics.median(self._seconds) if self._seconds else 0.0
        return max(self._at_least, _FACTOR * median)

    def _watch(self) -> None:
        while not self._stopped.wait(self._poll):
            with self._lock:
                waited = 0 if self._last is None else time.monotonic() - self._last
                step, limit = self._step, self.limit()
            if waited > limit:
                # The store may hang, if it is its process that stands still.
                asking = threading.Thread(target=self._report, args=(step, waited))
                asking.daemon = True
                asking.start()
                asking.join(10 + 5 * self._poll)
                self._end(HUNG)
                return

    def _beat(self) -> None:
        """Says again and again that this process lives; may hang with the store."""
        mine = f"{_PREFIX}/{jax.process_index()}"
        for beats in itertools.count():
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                said = f"{self._step} {beats}"
                self._client.key_value_set(mine, said, allow_overwrite=True)
            if self._stopped.wait(self._poll):
                return

    def _everyone(self) -> dict[int, tuple[int, int]]:
        """{process: (step, beats)} of those that have said anything."""
        found = {}
        for process in range(jax.process_count()):
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                text = self._client.key_value_try_get(f"{_PREFIX}/{process}")
                step, beats = text.split()
                found[process] = int(step), int(beats)
        return found

    def _report(self, step: int, waited: float) -> None:
        head = f"watchdog: no step for {waited:.0f} s after step {step}"
        print(f"{head}; this process ends", file=sys.stderr, flush=True)
        before = self._everyone()
        time.sleep(4 * self._poll)
        after = self._everyone()
        reached = {process: step for process, (step, _) in after.items()}
        everyone = range(jax.process_count())
        silent = [p for p in everyone if after.get(p) == before.get(p)]
        behind = [p for p in reached if reached[p] < max(reached.values())]
        print(
            f"{head}: steps reached {reached}; process(es) that stand still: "
            f"{silent or 'none'}; behind: {behind or 'none'}",
            file=sys.stderr,
            flush=True,
        )
