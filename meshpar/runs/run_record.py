"""The record of a run (run.json): whether it has had a checkpoint that can be lost.

A folder whose checkpoints are gone, such as a bucket that is not mounted, looks like
that of a new run. The record tells them apart, so that no run starts again at step 0
by mistake, and a run that was killed before its first checkpoint still does.
"""

import json
import os
import pathlib

import jax

from meshpar.errors import CheckpointError
from meshpar.multihost import agree
from meshpar.runs.metrics import METRICS

RECORD = "run.json"
CHECKPOINTS = "checkpoints"
"""Name of the folder of checkpoints in that of a run."""
_SAVED = "saved"


class RunRecord:
    """The record in a run's folder, which process 0 reads and writes.

    Attributes:
      older_run: what shows that the folder has held checkpoints; "" if nothing does.
    """

    def __init__(self, folder: pathlib.Path):
        """Reads the folder before anything else of the run; all processes call it.

        Args:
          folder: the run's folder.
        """
        self._folder, self._file = folder, folder / RECORD
        self._is_writer = jax.process_index() == 0
        self._saved = False
        older_run = _older_run(folder) if self._is_writer else ""
        self.older_run = agree.allgather_objects("older run", older_run)[0]
        if not self.older_run:
            self._write(saved=False)

    def start_anew(self, allowed: bool) -> None:
        """Records a start at step 0.

        Args:
          allowed: whether the checkpoints of an older run may be missing.

        Raises:
          CheckpointError: they are missing, and may not be.
        """
        if self.older_run and not allowed:
            raise CheckpointError(
                f"{self._folder} has held the checkpoints of a run ({self.older_run}), "
                f"and none is in {self._folder / 'checkpoints'}; mount the disk or "
                "restore that folder, or add --start_anew to train again from step 0"
            )
        self._write(saved=False)

    def look(self, step: int) -> None:
        """Records the first checkpoint as soon as it is complete.

        Args:
          step: that of the checkpoint that was written last, 0 for none.
        """
        if step and not self._saved and self._is_writer:
            if (self._folder / CHECKPOINTS / str(step)).is_dir():
                self.saved()

    def saved(self) -> None:
        """Records that the run has a checkpoint."""
        self._write(saved=True)

    def _write(self, saved: bool) -> None:
        self._saved = saved
        if self._is_writer:
            # Replaced at once: a process that is killed leaves a whole record.
            partial = self._file.with_suffix(".partial")
            partial.write_text(json.dumps({_SAVED: saved}) + "\n")
            os.replace(partial, self._file)


def _older_run(folder: pathlib.Path) -> str:
    """Names the traces of an earlier run in a folder; "" if there are none."""
    record = folder / RECORD
    if record.exists():
        never_saved = json.dumps({_SAVED: False}).encode()
        return "" if record.read_bytes().strip() == never_saved else RECORD
    metrics, corrupt = folder / METRICS, folder / "corrupt"
    run_id = folder / CHECKPOINTS / "run_id"
    traces = {
        METRICS: metrics.is_file() and metrics.stat().st_size,
        "checkpoints/run_id": run_id.exists(),
        "corrupt/": corrupt.is_dir() and any(corrupt.iterdir()),
    }
    return ", ".join(name for name, found in traces.items() if found)
