"""A watchdog: ends a run that hangs, names stalled processes and dumps their stacks.

A run is always in one section: its start, its first step, a step, an evaluation, a
save or its end. Each has a limit. A step's limit follows from the median of the steps
before; the others are given. Each process reports its section, its last finished step
and that it is alive to the key-value store of jax.distributed. When a section takes too
long, all processes that can still do so dump the stacks of their threads, and the
process ends with exit code `HUNG`. A launcher then starts the run again from its last
checkpoint.
"""

import contextlib
import faulthandler
import itertools
import math
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax

from meshpar import compat
from meshpar.errors import MeshparError

HUNG = 76
"""Exit code of a process whose run hung."""

START, FIRST_STEP, STEP = "start", "first_step", "step"
EVALUATION, SAVE, END = "evaluation", "save", "end"

SECTIONS: Mapping[str, str] = MappingProxyType(
    {
        START: "reading the data and restoring; the storage may have stalled",
        FIRST_STEP: "compiling and running the first step",
        STEP: "running a step",
        EVALUATION: "evaluating",
        SAVE: "saving a checkpoint; the storage may have stalled",
        END: "writing the last checkpoint and results; the storage may have stalled",
    }
)
"""{section: what a run does in it}."""

_PREFIX = "meshpar/watchdog"
_DUMP = f"{_PREFIX}/dump"
_FACTOR = 20
"""A step that takes this many times the median counts as hung."""

_STDERR = 2


def check_seconds(name: str, seconds: float) -> None:
    """Raises an error unless a limit is a number of seconds from 0.

    Raises:
      MeshparError: it is not.
    """
    if not (math.isfinite(seconds) and seconds >= 0):
        raise MeshparError(f"{name}={seconds}: use seconds, or 0 for no limit")


class Watchdog:
    """Watches the sections of this process's run.

    Steps are watched in runs of several processes alone, the other sections always.
    """

    def __init__(
        self,
        at_least_s: float,
        end: Callable[[int], None] = os._exit,
        poll_s: float = 1.0,
        limits: Mapping[str, float] = MappingProxyType({}),
        note: Callable[[int, str], None] = lambda step, section: None,
    ):
        """Makes a watchdog, which watches nothing before the first `enter`.

        Args:
          at_least_s: shortest time that counts as a hung step, in seconds; 0 for never.
          end: ends this process with an exit code.
          poll_s: interval of the checks, in seconds.
          limits: {section: longest time that it may take, in seconds}, 0 for any time,
            as for those left out; without `STEP`.
          note: is told the last finished step, 0 before the first, and the section
            whenever one of them changes.

        Raises:
          MeshparError: a time is not a number of seconds.
        """
        for name, seconds in {"at_least_s": at_least_s, **limits}.items():
            check_seconds(name, seconds)
        self._at_least, self._end, self._poll = at_least_s, end, poll_s
        self._limits, self._note = dict(limits), note
        self._client = compat.coordination_client()
        self._lock = threading.Lock()
        self._step_times: list[float] = []
        self._section, self._since, self._step = "", 0.0, 0
        self._stopped = threading.Event()

    def __enter__(self):
        loops = [self._watch, self._beat] if self._client else [self._watch]
        for loop in loops:
            threading.Thread(target=loop, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._stopped.set()

    def enter(self, section: str) -> None:
        """Notes that a section of `SECTIONS` begins; "" watches nothing."""
        with self._lock:
            self._section, self._since = section, time.monotonic()
        self._note(self._step, section)

    def finished(self, step: int) -> None:
        """Notes that a step's results have been read back from the devices."""
        with self._lock:
            now = time.monotonic()
            if self._section == STEP:
                self._step_times = [*self._step_times[-99:], now - self._since]
            self._section, self._since, self._step = STEP, now, step
        self._note(step, STEP)

    def pause(self) -> None:
        """Stops watching until `enter`, `resume` or the next step."""
        self.enter("")

    def resume(self) -> None:
        """Watches steps again, starting now."""
        self.enter(STEP if self._step_times else FIRST_STEP)

    def limit(self) -> float:
        """The limit of a step, in seconds."""
        median = statistics.median(self._step_times) if self._step_times else 0.0
        return max(self._at_least, _FACTOR * median)

    def _limit_of_section(self) -> float:
        if self._section == STEP:
            watched = self._at_least > 0 and self._client is not None
            return self.limit() if watched else math.inf
        return self._limits.get(self._section, 0) or math.inf

    def _watch(self) -> None:
        """Ends the process when a section takes too long."""
        last = time.monotonic()
        while not self._stopped.wait(self._poll):
            now = time.monotonic()
            with self._lock:
                # A time in which this process was suspended does not count.
                if now - last > 10 * self._poll:
                    self._since += now - last
                waited, limit = now - self._since, self._limit_of_section()
            last = now
            if waited > limit:
                head = self._describe(waited)
                # In a thread, as the store hangs if the process that serves it does.
                report = threading.Thread(target=self._report, args=[head])
                report.daemon = True
                self._dump(f"{head}, the limit is {limit:.3g} s; this process ends")
                report.start()
                report.join(10 + 5 * self._poll)
                self._end(HUNG)
                return

    def _describe(self, waited: float) -> str:
        who = f"watchdog: process {jax.process_index()}"
        if self._section == STEP:
            return f"{who}: no step for {waited:.0f} s after step {self._step}"
        what = SECTIONS.get(self._section, "doing what has no limit")
        section = self._section or "paused"
        return f"{who}: {section} for {waited:.0f} s after step {self._step} ({what})"

    def _dump(self, head: str) -> None:
        print(f"{head}; the stacks of its threads:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback(_STDERR)

    def _beat(self) -> None:
        """Reports at intervals that this process is alive; may hang with the store."""
        key, dumped = f"{_PREFIX}/{jax.process_index()}", False
        for beat in itertools.count():
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                text = f"{self._step} {beat} {self._section}"
                self._client.key_value_set(key, text, allow_overwrite=True)
            if not dumped and (other := self._value(_DUMP)):
                dumped = True
                if other != str(jax.process_index()):
                    waited = time.monotonic() - self._since
                    self._dump(f"{self._describe(waited)}; process {other} has stopped")
            if self._stopped.wait(self._poll):
                return

    def _value(self, key: str) -> str:
        with contextlib.suppress(jax.errors.JaxRuntimeError, KeyError):
            return self._client.key_value_try_get(key)
        return ""

    def _heartbeats(self) -> dict[int, tuple[int, int, str]]:
        """{process: (step, beat, section)} of the processes that have reported."""
        heartbeats = {}
        for process in range(jax.process_count()):
            if text := self._value(f"{_PREFIX}/{process}"):
                step, beat, *section = text.split()
                heartbeats[process] = int(step), int(beat), "".join(section)
        return heartbeats

    def _report(self, head: str) -> None:
        """Says how far all processes are and makes the others dump their stacks."""
        if self._client is None:
            return
        before = self._heartbeats()
        own = str(jax.process_index())
        self._client.key_value_set(_DUMP, own, allow_overwrite=True)
        time.sleep(4 * self._poll)
        after = self._heartbeats()
        reached = {process: step for process, (step, _, _) in after.items()}
        sections = {process: section for process, (_, _, section) in after.items()}
        processes = range(jax.process_count())
        stalled = [p for p in processes if after.get(p) == before.get(p)]
        behind = [p for p in reached if reached[p] < max(reached.values())]
        print(
            f"{head}: steps reached {reached}; sections {sections}; stalled "
            f"process(es): {stalled or 'none'}; behind: {behind or 'none'}",
            file=sys.stderr,
            flush=True,
        )
