"""Guards of a run: a flag for stop signals, and a lock on its folder."""

import contextlib
import fcntl
import pathlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax

from meshpar.errors import CheckpointError


class StopFlag:
    """A flag set by the first SIGTERM or Ctrl-C; a second Ctrl-C interrupts at once.

    Attributes:
      signal: the signal that arrived, or None.
    """

    def __init__(self):
        self.signal: signal.Signals | None = None

    def __enter__(self):
        # Python lets the main thread alone handle signals.
        is_main = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGTERM, signal.SIGINT) if is_main else ()
        self._handlers = {n: signal.signal(n, self._handle) for n in signals}
        return self

    def _handle(self, number: int, frame: Any) -> None:
        if self.signal == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)

    def __exit__(self, *_):
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def own_folder(folder: pathlib.Path) -> Iterator[None]:
    """Makes and locks the run's folder, so that no second run writes to it.

    Raises:
      CheckpointError: the folder cannot be written to, or another run has locked it.
    """
    if jax.process_index():
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise CheckpointError(
            f"cannot write to {folder}: {error.strerror}; choose another --workdir"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another run is writing to {folder}; stop it or choose another "
                "--workdir"
            ) from error
        yield
