"""A slow disk: runs a command whose files take their time while a flag is up.

    python -m experiments.faults.slow_disk FOLDER experiments.run --recipe=tiny

Python tells what it does with files by its audit events. What C++ writes by itself is
as fast as ever: opening, renaming and removing is slow, as on a busy network disk.
"""

import os
import pathlib
import runpy
import sys
import time
from typing import Any

_DELAY_S = 0.1
_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}


def flag(folder: pathlib.Path) -> pathlib.Path:
    """The file that makes the disk slow as long as it exists."""
    return folder / "slow"


def _hook(folder: pathlib.Path):
    """A hook for audit events, which waits for those of files in a folder."""
    inside, slow = f"{folder}/", str(flag(folder))

    def wait(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _EVENTS and str(arguments[0]).startswith(inside):
            if os.path.exists(slow):
                time.sleep(_DELAY_S)

    return wait


if __name__ == "__main__":
    _, place, module, *words = sys.argv
    sys.addaudithook(_hook(pathlib.Path(place)))
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
