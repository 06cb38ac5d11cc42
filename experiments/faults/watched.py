"""A supervised run, watched from outside: its processes, its section and its end."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from meshpar.multihost.watchdog import FIRST_STEP, START

HUNG_S = 300.0
"""A run without any progress for this long counts as hung, in seconds.

On a busy machine a start, or a program to compile, takes minutes.
"""

POLL_S = 0.004
_CHECK_S = 0.5

_SUPERVISE = "experiments.supervise"
_RESTARTS = 1000
_ACTOR, _IDLE = b"ray::", b"ray::IDLE"


class LostError(Exception):
    """A run ended in a way that loses work, or needs more than its message says."""


class HungError(Exception):
    """A run made no progress for `HUNG_S`."""


def _state(pid: int) -> str:
    """The state of a process as one letter, Z for a zombie; "" if it is gone."""
    with contextlib.suppress(OSError):
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0]
    return ""


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    return _state(pid) not in ("", "Z")


def send(pid: int, number: signal.Signals) -> None:
    """Sends a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def variables(pid: int) -> dict[str, str]:
    """The environment of a process; {} if it has ended."""
    with contextlib.suppress(OSError):
        texts = pathlib.Path(f"/proc/{pid}/environ").read_text().split("\0")
        return dict(text.split("=", 1) for text in texts if "=" in text)
    return {}


class WatchedRun:
    """A run under `experiments.supervise`, which can be started again.

    Attributes:
      folder: holds its logs, its run's folder and its local disk.
      num_processes: number of its processes.
      supervisor: the id of the supervisor.
      starts: how often it was started by hand.
      disk_was_full: whether its disk was full since then.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: pathlib.Path,
        num_processes: int,
    ):
        """Starts the run.

        Args:
          command: the words of its command.
          environment: its variables.
          folder: for its files; made if it is missing.
          num_processes: number of its processes.
        """
        self.folder, self.num_processes = folder, num_processes
        self.logs = folder / "logs"
        self._progress = self.logs / "progress"
        words = [sys.executable, "-m", _SUPERVISE, f"--restarts={_RESTARTS}"]
        words += ["--backoff=0.01", f"--processes={num_processes}"]
        self._words = [*words, f"--log_dir={self.logs}", "--", *command]
        self._log, self._environment = folder / "supervisor.log", dict(environment)
        self.starts = 0
        self._seen: object = None
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    def start(self) -> None:
        """Starts the supervisor, as a person would by hand."""
        self.starts += 1
        self._moved = self._check_at = time.monotonic()
        self._ranks: dict[int, int | None] = {}
        self._began = self._log.stat().st_size if self._log.exists() else 0
        self.disk_was_full = False
        self._progress.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._words,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.supervisor = self._process.pid

    def code(self) -> int | None:
        """The exit code of the supervisor; None while it runs."""
        return self._process.poll()

    def pids(self) -> dict[int, int]:
        """{rank: id} of the running processes of the run."""
        children = f"/proc/{self.supervisor}/task/{self.supervisor}/children"
        try:
            found = [int(pid) for pid in pathlib.Path(children).read_text().split()]
        except OSError:
            found = []
        for pid in found:
            if self._ranks.get(pid) is None:
                self._ranks[pid] = self._rank(pid)
        ranks = {pid: self._ranks[pid] for pid in found if is_running(pid)}
        return {rank: pid for pid, rank in ranks.items() if rank is not None}

    def actors(self) -> list[int]:
        """Ids of the running actors of Ray that its processes started."""
        found, left = [], [*self.pids().values()]
        while left:
            pid = left.pop()
            with contextlib.suppress(OSError):
                for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
                    left += [int(x) for x in (task / "children").read_text().split()]
                words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
                if words.startswith(_ACTOR) and not words.startswith(_IDLE):
                    found.append(pid)
        return sorted(found)

    def _rank(self, pid: int) -> int | None:
        """The rank of a process; None for a guard, or before it runs the command."""
        with contextlib.suppress(OSError):
            words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if _SUPERVISE.encode() not in words:
                rank = variables(pid).get("MESHPAR_PROCESS_ID", "")
                return int(rank) if rank.isdigit() else None
        return None

    def position(self) -> tuple[int, str]:
        """(last finished step, section) of process 0, as it wrote them."""
        with contextlib.suppress(OSError, ValueError), open(self._progress) as file:
            step, section = file.read().split()
            return int(step), section
        return 0, START

    def section(self) -> str:
        """The section of the run; "" between two attempts."""
        return self.position()[1] if self.pids() else ""

    def rest(self) -> None:
        """Waits until it is worth to look again; long sections can wait longer."""
        slow = self.position()[1] in (START, FIRST_STEP)
        time.sleep(10 * POLL_S if slow else POLL_S)

    def check_moving(self) -> None:
        """Raises HungError, after the stacks were dumped, if nothing moves."""
        now = time.monotonic()
        if now < self._check_at:
            return
        self._check_at = now + _CHECK_S
        position, pids = self.position(), self.pids()
        seen = position, pids, self._said()
        if seen != self._seen:
            self._seen, self._moved = seen, now
        elif now - self._moved > HUNG_S:
            for pid in pids.values():  # The run's faulthandler writes its log.
                send(pid, signal.SIGCONT)
                send(pid, signal.SIGABRT)
            time.sleep(1.0)
            raise HungError(
                f"no progress for {HUNG_S:.0f} s in {position[1]} after step "
                f"{position[0]}; the stacks are in {self.logs}"
            )

    def _said(self) -> int:
        """Bytes in the logs."""
        return sum(log.stat().st_size for log in self.logs.glob("*.log"))

    def text(self) -> str:
        """The output of the run since it was started by hand."""
        logs = sorted(self.logs.glob("*.log"))
        said = [log.read_text(errors="replace") for log in logs]
        with self._log.open(errors="replace") as log:
            log.seek(self._began)
            return "\n".join([*said, log.read()])

    def kill(self) -> None:
        """Ends the supervisor and waits for all that it has started.

        Raises:
          LostError: a process outlives it.
        """
        pids = self.pids().values()
        self._process.kill()
        self._process.wait()
        end = time.monotonic() + 30
        while left := [pid for pid in pids if is_running(pid)]:
            if time.monotonic() > end:
                for pid in left:
                    send(pid, signal.SIGKILL)
                raise LostError(f"processes {left} outlived their supervisor")
            time.sleep(POLL_S)
