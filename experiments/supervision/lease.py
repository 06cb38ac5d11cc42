"""A lease on process groups: they end with their owner, even if it is killed."""

import contextlib
import ctypes
import os
import signal
import sys


def end_group(group: int, number: signal.Signals) -> bool:
    """Sends a signal to a process group; returns whether it had processes."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS: only zombies are left.
        return False
    return True


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    """Changes how Linux treats this process; has no effect on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Makes orphaned descendants children of this process, which can reap them.

    Otherwise they become children of process 1, and in many containers that one never
    reaps them: their group seems to live on. It has no effect outside of Linux.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


class Lease:
    """A guard process that kills the groups which its owner leaves behind.

    The owner holds one end of a pipe and the guard the other. The guard reads which
    groups exist. When the owner ends, however it ends, the pipe closes, and the guard
    kills what is left. Grandchildren are in the groups of their parents. If the guard
    is killed as well, the children still end with their owner on Linux.
    """

    def __enter__(self):
        read, self._write = os.pipe()
        self._guard = os.fork()
        if self._guard == 0:
            try:
                os.close(self._write)
                _guard(read)
            finally:
                os._exit(0)
        os.close(read)
        adopt_orphans()
        return self

    def __exit__(self, *_):
        os.close(self._write)
        os.waitpid(self._guard, 0)

    def take(self) -> None:
        """Notes the group of the calling process; a child calls it before `exec`."""
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.write(self._write, f"+{os.getpid()}\n".encode())

    def give_back(self, group: int) -> None:
        """Forgets a group that has ended."""
        os.write(self._write, f"-{group}\n".encode())


def _guard(read: int) -> None:
    """Reads groups until the owner has ended, then kills those that it has left."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    groups = set()
    with contextlib.suppress(OSError), open(read) as lines:
        for line in lines:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        end_group(group, signal.SIGKILL)
