"""TensorBoard files of a run: a copy of its metrics for people to look at.

They are written at once and not by tensorboardX's thread: when a write fails, that
thread ends, and the run would wait for it forever. Here a failed write is a warning,
since `metrics.jsonl` holds the same values.
"""

import contextlib
import pathlib
import socket
import time
from collections.abc import Mapping

from absl import logging
from tensorboardX import summary
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter

_FLUSH_S = 60.0


class TensorBoard:
    """The TensorBoard files in a folder; a full disk ends them, but not the run."""

    def __init__(self, folder: pathlib.Path, purge_after: int | None):
        """Opens a new file beside those of earlier starts.

        Args:
          folder: made if it is missing.
          purge_after: hides what earlier starts wrote about later steps than this.

        Raises:
          OSError: something else is in the place of the folder.
        """
        self._folder, self._flush_at = folder, 0.0
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._writer: RecordWriter | None = RecordWriter(str(folder / name))
        self._write(Event(file_version="brain.Event:2"))
        if purge_after is not None:
            start = SessionLog(status=SessionLog.START)
            self._write(Event(step=purge_after + 1, session_log=start))

    def add_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of one step."""
        for name, value in values.items():
            self._write(Event(step=step, summary=summary.scalar(name, value)))

    def add_text(self, step: int, name: str, text: str) -> None:
        """Writes a text."""
        self._write(Event(step=step, summary=summary.text(name, text)))

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._attempt("write", event.SerializeToString())
        if time.monotonic() > self._flush_at:
            self._attempt("flush")
            self._flush_at = time.monotonic() + _FLUSH_S

    def close(self) -> None:
        """Closes the file."""
        self._attempt("close")
        self._writer = None

    def _attempt(self, method: str, *arguments: bytes) -> None:
        """Calls the writer; the first failure is a warning and the last call."""
        if self._writer is None:
            return
        try:
            getattr(self._writer, method)(*arguments)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._writer.close()
            self._writer = None
            logging.warning(
                "the TensorBoard files in %s end here (%s); metrics.jsonl goes on",
                self._folder,
                error,
            )
