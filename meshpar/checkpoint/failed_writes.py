"""Failed writes of several processes: each of them learns of the failure of any.

Orbax's background threads meet at barriers while a checkpoint is written. A process
whose write fails goes on to another barrier than the rest, and all of them would wait
for each other until orbax gives up, after 20 minutes.
"""

import contextlib
import itertools
import pathlib
import threading
from collections.abc import Callable
from concurrent import futures

import jax

from meshpar import compat
from meshpar.checkpoint import background_errors

_POLL_S = 0.2
_GRACE_S = 2.0
"""Time in which orbax itself may report a failure that is known."""

_numbers = itertools.count()


class WriteFailedError(Exception):
    """A process could not write its part of a checkpoint, by the text of its error."""


class WriteStalledError(WriteFailedError, TimeoutError):
    """A process took too long to write its part."""


_KINDS = {kind.__name__: kind for kind in (WriteFailedError, WriteStalledError)}


class FailedWrites:
    """The failures of the writes to one folder, in all processes of a run.

    All processes make it in the same order, as they find each other by its number.
    """

    def __init__(self, folder: pathlib.Path):
        """Listens to the writes of this process.

        Args:
          folder: where they go.
        """
        self._folder = folder
        self._key = f"meshpar/failed_write/{next(_numbers)}"
        self._client = compat.coordination_client()
        self._first: WriteFailedError | None = None
        if self._client is not None:
            background_errors.listen(self._note)

    def close(self) -> None:
        """Listens no more."""
        background_errors.listen_no_more(self._note)

    def wait(self, finish: Callable[[], None]) -> None:
        """Waits for the writes in the background.

        Args:
          finish: waits for them, and raises their errors in this process.

        Raises:
          WriteFailedError: a process failed while `finish` waits for it; a
            `WriteStalledError` if it took too long.
          Exception: of `finish`.
        """
        if self._client is None:
            return finish()
        done: futures.Future[None] = futures.Future()

        def run() -> None:
            try:
                done.set_result(finish())
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, daemon=True, name="wait for writes").start()
        while not _ends(done, _POLL_S):
            if (error := self._known()) and not _ends(done, _GRACE_S):
                raise error
        return done.result()

    def _note(self, said: str, error: BaseException) -> None:
        """Tells all processes of a failure in this one."""
        if str(self._folder) not in said:
            return
        stalled = isinstance(error, TimeoutError)
        kind = WriteStalledError if stalled else WriteFailedError
        text = str(error).split("\n")[0]
        self._first = self._first or kind(text)
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # Another was first.
            self._client.key_value_set(self._key, f"{kind.__name__} {text}")

    def _known(self) -> WriteFailedError | None:
        """A failure, of this process or of another; None without one."""
        if self._first is None:
            with contextlib.suppress(jax.errors.JaxRuntimeError, KeyError):
                kind, _, text = self._client.key_value_try_get(self._key).partition(" ")
                self._first = _KINDS[kind](text)
        return self._first


def _ends(done: futures.Future[None], seconds: float) -> bool:
    """Whether something ends in a time, well or with an error."""
    return bool(futures.wait([done], timeout=seconds).done)
