"""Runs a command, in one or many processes, and starts it again when it fails.

    python -m experiments.supervise --restarts=5 -- python -m experiments.run

It needs the standard library alone. Signals are passed on. An exit code that cannot end
better the next time is final; after others the run starts again from its last
checkpoint, after a pause that doubles. All processes and their descendants end with the
supervisor, even if it is killed.
"""

import argparse
import math
import os
import pathlib
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.supervision.attempt import (
    POLL_S,
    STOPPED,
    Attempt,
    Outcome,
    Place,
    say,
)
from experiments.supervision.lease import Lease
from experiments.supervision.restarts import Restarts, describe

_TAIL_LINES = 80


def _whole_number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError
    return seconds


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="experiments.supervise",
        usage="python -m experiments.supervise [OPTIONS] -- COMMAND...",
        description="Runs a command and starts it again when it fails.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--restarts", "--max_restarts", type=_whole_number, default=0, metavar="N")
    add("--backoff", type=_seconds, default=1.0, metavar="SECONDS")
    add("--processes", type=_whole_number, default=0, metavar="N")
    add("--coordinator_host", default="", metavar="HOST")
    add("--log_dir", type=pathlib.Path, default=pathlib.Path("logs"), metavar="DIR")
    add("--on_signal", default="", metavar="COMMAND")
    add("--on_stopped", default="", metavar="COMMAND")
    add("--dry_run", action="store_true")
    words = list(words)
    split = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:split])
    options.command = words[split + 1 :]
    if not options.command:
        parser.error("write -- and the command after the options")
    return options


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _folder_of_run(options: argparse.Namespace) -> pathlib.Path:
    """The folder that the command names as --workdir, or else that of the logs."""
    folder = options.log_dir
    for word, after in zip(options.command, [*options.command[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name == "--workdir":
            folder = pathlib.Path(value or after)
    return folder if folder.is_dir() else options.log_dir


class Supervisor:
    """Starts a command until it ends for good."""

    def __init__(self, options: argparse.Namespace, lease: Lease):
        """Prepares the logs.

        Args:
          options: the options of the command line.
          lease: ends all processes if this one is killed.
        """
        self._options, self._lease = options, lease
        self._progress = options.log_dir.absolute() / "progress"
        self._signals: list[signal.Signals] = []
        self._heard = 0
        names = map(str, range(options.processes)) if options.processes else ["all"]
        self._logs = [options.log_dir / f"{name}.log" for name in names]
        options.log_dir.mkdir(parents=True, exist_ok=True)
        for log in self._logs:
            log.write_bytes(b"")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # As nohup sets it.
                signal.signal(number, self._hear)

    def _hear(self, number: int, _: Any) -> None:
        self._signals.append(signal.Signals(number))

    def run(self) -> int:
        """Runs the command to its end; returns its exit code."""
        options = self._options
        restarts = Restarts(options.restarts, options.backoff)
        while True:
            self._progress.unlink(missing_ok=True)
            begins = [log.stat().st_size for log in self._logs]
            code, process = self._attempt(new_port=restarts.ports_taken > 0)
            step = self._step()
            if code not in (0, STOPPED):
                self._record(Outcome(code, process), step, begins[process])
            if self._signals:
                saved = code == STOPPED and self._signals[0] == signal.SIGTERM
                if saved and options.on_stopped:
                    subprocess.run(shlex.split(options.on_stopped))
                return code
            pause = restarts.pause(code, step)
            if pause is None:
                if restarts.why_not:
                    say(f"ended with {describe(code)}{restarts.why_not}")
                return code
            say(
                f"ended with {describe(code)} after step {step or 0}: restart "
                f"{restarts.done} of {restarts.most}, from the last checkpoint"
                + (f", in {pause:g} s" if pause else "")
            )
            if self._sleep(pause):
                return code

    def _attempt(self, new_port: bool) -> Outcome:
        """Starts the processes and waits for them; passes signals on."""
        places = self._places(new_port)
        try:
            attempt = Attempt(self._options.command, places, self._lease)
        except OSError as error:
            say(f"cannot start {self._options.command[0]}: {error.strerror}")
            return Outcome(2, 0)
        self._heard = 0
        while (outcome := attempt.poll()) is None:
            for _ in self._signals[self._heard :]:
                self._heard += 1
                self._pass_on(attempt)
            time.sleep(POLL_S)
        return outcome

    def _pass_on(self, attempt: Attempt) -> None:
        """Passes a signal on: first to save and end, then to end, then to be killed."""
        if self._heard == 1 and self._options.on_signal:
            subprocess.Popen(shlex.split(self._options.on_signal))
        else:
            numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
            attempt.send(numbers[min(self._heard, 3) - 1])

    def _places(self, new_port: bool) -> list[Place]:
        """The processes of one start, with a port and a token of their own.

        Args:
          new_port: whether the port that jax derives from the cluster is taken.
        """
        options = self._options
        own = {"MESHPAR_PROGRESS": str(self._progress)}
        if not any(map(os.environ.get, ("MESHPAR_TOKEN", "MESHPAR_TOKEN_FILE"))):
            own["MESHPAR_TOKEN"] = secrets.token_hex(32)
        environment: Mapping[str, str] = os.environ | own
        port = str(_free_port())
        address = f"{options.coordinator_host or 'localhost'}:{port}"
        if not options.processes:
            if options.coordinator_host:
                environment = {"MESHPAR_COORDINATOR": address} | environment
            if new_port:
                environment = {"JAX_COORDINATOR_PORT": port} | environment
            return [Place(self._logs[0], environment, True)]
        ranks = {"MESHPAR_COORDINATOR": address}
        ranks["MESHPAR_NUM_PROCESSES"] = str(options.processes)
        return [
            Place(log, environment | ranks | {"MESHPAR_PROCESS_ID": str(i)}, i == 0)
            for i, log in enumerate(self._logs)
        ]

    def _step(self) -> int | None:
        """The last step that process 0 finished, if the run has written one."""
        try:
            return int(self._progress.read_text().split()[0]) or None
        except (OSError, ValueError, IndexError):
            return None

    def _record(self, outcome: Outcome, step: int | None, begin: int) -> None:
        """Appends the cause of a failure to failures.txt; the first is on top."""
        log = self._logs[outcome.process]
        with log.open("rb") as file:
            file.seek(begin)
            said = file.read().decode(errors="replace")
        tail = "\n".join(said.splitlines()[-_TAIL_LINES:])
        path = _folder_of_run(self._options) / "failures.txt"
        who = f"process {outcome.process}" if self._options.processes else "the command"
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        try:
            with path.open("a") as file:
                file.write(
                    f"{when}: {who} ended with {describe(outcome.code)} after step "
                    f"{step or 0}; the end of {log}:\n{tail}\n\n"
                )
        except OSError as error:
            say(f"cannot write {path}: {error.strerror}")
        say(f"{who} ended with {describe(outcome.code)}: see {log} and {path}")

    def _sleep(self, seconds: float) -> bool:
        """Waits; returns at once, and True, when a signal asks to stop."""
        end = time.monotonic() + seconds
        while not self._signals and time.monotonic() < end:
            time.sleep(POLL_S)
        return bool(self._signals)


def main(words: Sequence[str]) -> int:
    """Supervises the command in `words`; returns its exit code."""
    options = _parse(words)
    if options.dry_run:
        if options.processes:
            print(
                f"{options.processes} processes on this machine, each with "
                "MESHPAR_COORDINATOR=localhost:PORT MESHPAR_NUM_PROCESSES="
                f"{options.processes} MESHPAR_PROCESS_ID=0..{options.processes - 1}, "
                f"logs in {options.log_dir}, at most {options.restarts} restarts:"
            )
        print(shlex.join(options.command))
        return 0
    with Lease() as lease:
        try:
            supervisor = Supervisor(options, lease)
        except OSError as error:
            say(f"cannot write logs to {options.log_dir}: {error.strerror}")
            return 2
        return supervisor.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
