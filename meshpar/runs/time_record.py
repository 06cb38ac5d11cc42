"""The record of a run's time (goodput.jsonl): the part of the run it is in.

Process 0 adds a line when a part begins, when a step is done, and every few seconds in
between, so that a kill leaves behind when it came and what it struck. `goodput` reads
the lines of all starts.
"""

import contextlib
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TextIO

import jax

from meshpar.multihost import watchdog
from meshpar.runs import json_lines, startup

RECORD = "goodput.jsonl"
"""Name of the file in the run's folder."""

START, RESTORE, STEPS = "start", "restore", "steps"
CHECKPOINTS, EVALUATION, END = "checkpoints", "evaluation", "end"
DOWN = "down"
"""The part between the end of a process and the next start."""

DONE, STOPPED, FAILED = "done", "stopped", "failed"
"""How a start ends that was not killed: after its last step, by a signal, by an error.
"""

_PARTS: Mapping[str, str] = MappingProxyType(
    {
        watchdog.START: START,
        watchdog.FIRST_STEP: STEPS,
        watchdog.STEP: STEPS,
        watchdog.EVALUATION: EVALUATION,
        watchdog.SAVE: CHECKPOINTS,
        watchdog.END: END,
    }
)
"""{section of the watchdog: part of the record}."""

_ALIVE_S = 10.0
"""Longest time without a line, in seconds."""


def steady_clock() -> Callable[[], float]:
    """A clock of seconds since the epoch, which no later change of the date moves."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


class TimeRecord:
    """Writes one start of a run to the record of its folder."""

    def __init__(
        self, begin: float | None = None, clock: Callable[[], float] | None = None
    ):
        """Starts the clock, in the part `START`; nothing is written yet.

        Args:
          begin: when the process began, if that counts as the start of the run.
          clock: gives seconds since the epoch; `steady_clock` by default.
        """
        self._clock = clock or steady_clock()
        self._since = self._clock() if begin is None else begin
        self._file: TextIO | None = None
        self._compiled: list[tuple[float, float]] = []
        self._lock, self._closed = threading.Lock(), threading.Event()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Counts traces and compilations of this thread inside."""
        thread = threading.get_ident()

        def hear(event: str, begin: float, end: float, **_: Any) -> None:
            if threading.get_ident() == thread and (
                event == startup.COMPILE_EVENT or event in startup.TRACE_EVENTS
            ):
                self._compiled.append((begin, end))

        jax.monitoring.register_event_time_span_listener(hear)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_time_span_listener(hear)

    @contextlib.contextmanager
    def recording(self, folder: pathlib.Path, **facts: Any) -> Iterator[None]:
        """Writes lines inside, on process 0; an end without `close` is a failure.

        Args:
          folder: the run's folder, locked by this process.
          **facts: what the first line says of this start.
        """
        if jax.process_index():
            yield
            return
        self._file = json_lines.open_to_add(folder / RECORD)
        first = {"time": self._since, "part": START, "start": facts}
        json_lines.add(self._file, first)
        threading.Thread(target=self._stay_alive, daemon=True).start()
        with self.listening():
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # An error of the run goes on.
                    self.close(FAILED)

    def enter(self, part: str, **facts: Any) -> None:
        """Begins a part.

        Args:
          part: one of those above.
          **facts: what its line says beside it.
        """
        with self._lock:
            if self._file:
                now = self._clock()
                compiled = startup.covered(self._compiled, self._since, now)
                self._since, self._compiled = now, []
                spent = {"compiled": compiled} if compiled else {}
                row = {"time": now, "part": part, **spent, **facts}
                json_lines.add(self._file, row)

    def restored(self, step: int) -> None:
        """Ends the part `RESTORE`; the run goes on after a step, 0 for a new one."""
        self.enter(START, restored=step)

    def note(self, step: int, section: str) -> None:
        """Begins the part of a section of the watchdog, as its `note`.

        Args:
          step: the last finished step of this start, 0 before the first.
          section: of `watchdog.SECTIONS`; "" changes nothing.
        """
        if part := _PARTS.get(section):
            self.enter(part, step=step)

    def close(self, how: str) -> None:
        """Ends the record of this start, unless it has ended.

        Args:
          how: `DONE`, `STOPPED` or `FAILED`.
        """
        if not self._file:
            return
        try:
            self.enter(DOWN, ended=how)
        finally:
            self._closed.set()
            with self._lock:
                file, self._file = self._file, None
                file.close()

    def _stay_alive(self) -> None:
        """Adds a line every few seconds, until the record is closed or cannot be."""
        with contextlib.suppress(OSError):  # A full disk: the next part says so.
            while not self._closed.wait(_ALIVE_S):
                with self._lock:
                    if self._file:
                        json_lines.add(self._file, {"time": self._clock()})
