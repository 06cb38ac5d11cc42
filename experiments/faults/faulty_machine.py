"""A faulty machine: runs a command with a slow disk, and a clock that jumps.

    python -m experiments.faults.faulty_machine FOLDER experiments.run --recipe=tiny

Files in the folder switch the faults on and off while the command runs. Python tells
what it does with files by its audit events. What C++ writes by itself is as fast as
ever: opening, renaming and removing is slow, as on a busy network disk. The clock of
the day (`time.time`) jumps, as where a machine's clock is set; the monotonic clock
never does.
"""

import os
import pathlib
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

_DELAY_S = 0.1
_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}


def slow_flag(folder: pathlib.Path) -> pathlib.Path:
    """The file that makes the disk slow as long as it exists."""
    return folder / "slow"


def clock_flag(folder: pathlib.Path) -> pathlib.Path:
    """The file that shifts the clock, by its modification time minus `EPOCH_NS`.

    One call reads that time whole, and another sets it.
    """
    return folder / "clock"


EPOCH_NS = 10**18
"""The modification time of a clock file that shifts nothing, in nanoseconds."""


def _wait_on_files(folder: pathlib.Path) -> Callable[[str, tuple[Any, ...]], None]:
    """A hook for audit events, which waits for those of files in a folder."""
    inside, slow = f"{folder}/", str(slow_flag(folder))

    def wait(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS and str(arguments[0]).startswith(inside):
            if os.path.exists(slow):
                time.sleep(_DELAY_S)

    return wait


def _shift_clock(folder: pathlib.Path) -> None:
    """Puts a clock in the place of `time.time` that a file can shift."""
    true_ns, flag = time.time_ns, str(clock_flag(folder))

    def shifted_ns() -> int:
        try:
            return true_ns() + os.stat(flag).st_mtime_ns - EPOCH_NS
        except OSError:
            return true_ns()

    time.time_ns, time.time = shifted_ns, lambda: shifted_ns() / 1e9


if __name__ == "__main__":
    _, place, module, *words = sys.argv
    sys.addaudithook(_wait_on_files(pathlib.Path(place)))
    _shift_clock(pathlib.Path(place))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
