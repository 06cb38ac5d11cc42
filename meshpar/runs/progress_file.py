"""The progress file ($MESHPAR_PROGRESS): how far a run is, for programs that watch it.

It holds one line "STEP SECTION": the last step that this process has finished since it
started, 0 before the first, and the section of `meshpar.multihost.watchdog` that it is
in. There is no file before the run reads its data.
"""

import contextlib
import os
import pathlib

import jax


def write(step: int, section: str) -> None:
    """Writes the file of process 0, if there is to be one; a full disk has none."""
    path = os.environ.get("MESHPAR_PROGRESS")
    if not path or jax.process_index():
        return
    with contextlib.suppress(OSError):
        # Replaced at once: a process that is killed leaves a whole line.
        partial = pathlib.Path(f"{path}.partial")
        partial.write_text(f"{step} {section}\n")
        os.replace(partial, path)
