"""One attempt at a run: its processes, their logs, and how they end together."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.supervision.lease import Lease, end_group

STOPPED = 75
"""Exit code of a process that saved and ended because of a signal."""

GRACE_S = 10.0
"""How long processes may take to end after another one has failed, in seconds."""

POLL_S = 0.05

_LEFTOVER_S = 2.0


def say(text: str) -> None:
    """Prints a line for people; the terminal may have gone."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class Place(NamedTuple):
    """The log file and the environment of a process.

    Attributes:
      log: file of its output.
      environment: its variables.
      shown: whether its output also goes to the terminal.
    """

    log: pathlib.Path
    environment: Mapping[str, str]
    shown: bool


class Outcome(NamedTuple):
    """The outcome of an attempt.

    Attributes:
      code: 0, or the exit code of the process that failed first.
      process: number of that process.
    """

    code: int
    process: int


class Attempt:
    """The processes of one attempt, each the leader of a group of its own."""

    def __init__(self, command: Sequence[str], places: Sequence[Place], lease: Lease):
        """Starts the processes.

        Args:
          command: the words of the command.
          places: one for each process.
          lease: ends the groups if the caller is killed.

        Raises:
          OSError: the command cannot be started.
        """
        self._lease = lease
        self._running: dict[int, subprocess.Popen] = {}
        self._copies: list[threading.Thread] = []
        self._code, self._failed = 0, 0
        self._kill_at = float("inf")
        for number, place in enumerate(places):
            with place.log.open("ab") as log:
                self._running[number] = subprocess.Popen(
                    command,
                    env=place.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if place.shown else log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=lease.take,
                )
        # Threads start last: a process that forks should have no others.
        for process, place in zip(self._running.values(), places, strict=True):
            if place.shown:
                words = process.stdout, place.log
                self._copies.append(threading.Thread(target=_copy, args=words))
        for copy in self._copies:
            copy.daemon = True
            copy.start()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to every process; SIGKILL to their groups."""
        for process in self._running.values():
            if number == signal.SIGKILL:
                end_group(process.pid, number)
            else:
                process.send_signal(number)

    def poll(self) -> Outcome | None:
        """Looks after the processes; returns the outcome when all have ended.

        When one fails, the others are stopped: they get SIGTERM and, after `GRACE_S`,
        SIGKILL. A process that was stopped by a signal (`STOPPED`) is no failure: all
        others stop at the same step.
        """
        ended = {n: p for n, p in self._running.items() if p.poll() is not None}
        failures = []
        for number, process in ended.items():
            del self._running[number]
            _end_leftovers(process.pid)
            self._lease.give_back(process.pid)
            code = process.returncode
            failures.append((code if code >= 0 else 128 - code, number))
        # Of several at once, one that a signal killed is the cause.
        code, number = max(failures, default=(0, 0))
        if code and self._code in (0, STOPPED):
            self._code, self._failed = code, number
            if code != STOPPED and self._running:
                say(f"process {number} ended with code {code}; stopping the others")
                self.send(signal.SIGTERM)
                self._kill_at = time.monotonic() + GRACE_S
        if time.monotonic() > self._kill_at:
            self.send(signal.SIGKILL)
        if self._running:
            return None
        for copy in self._copies:
            copy.join(_LEFTOVER_S)
        return Outcome(self._code, self._failed)


def _copy(stream, log: pathlib.Path) -> None:
    """Copies a process's output to this terminal and to its log."""
    with stream, log.open("ab", buffering=0) as file:
        while data := os.read(stream.fileno(), 65536):
            with contextlib.suppress(OSError):  # The disk may be full.
                file.write(data)
            with contextlib.suppress(OSError):  # The terminal may have gone.
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()


def _end_leftovers(group: int) -> None:
    """Ends the descendants that a process left running."""
    end_at = time.monotonic() + _LEFTOVER_S
    left = end_group(group, signal.SIGTERM)
    while left and time.monotonic() < end_at:
        time.sleep(POLL_S)
        with contextlib.suppress(ChildProcessError):  # None was adopted.
            while os.waitpid(-group, os.WNOHANG)[0]:
                pass
        left = end_group(group, signal.SIGCONT)
    if left:
        end_group(group, signal.SIGKILL)
