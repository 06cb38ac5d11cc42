"""Errors in background threads of orbax: kept off the log, as they are raised again.

Orbax logs an error with its traceback in every thread that meets it, and raises it when
the checkpoint is waited for or read. There the tiers report it once, with the remedy.
"""

import functools
import logging
import pathlib
import sys
from collections.abc import Callable
from typing import Any

Listener = Callable[[str, BaseException], None]
"""(the line that orbax logs, which names the folder; the error)."""

_LISTENERS: list[Listener] = []
_WRITES = "background save thread"


def listen(listener: Listener) -> None:
    """Tells a function the errors of writes, in the thread that meets them."""
    _LISTENERS.append(listener)


def listen_no_more(listener: Listener) -> None:
    """Undoes `listen`; does nothing without it."""
    if listener in _LISTENERS:
        _LISTENERS.remove(listener)


def _is_raised_again(record: logging.LogRecord) -> bool:
    """Whether a record is of an error that a tier reports; tells listeners of it."""
    text = record.getMessage()
    if "orbax" in pathlib.PurePath(record.pathname).parts:
        if record.exc_info and _WRITES in text:
            for listener in list(_LISTENERS):
                listener(text, record.exc_info[1])
        return record.levelno >= logging.ERROR or "file does not exist" in text
    # Many readers fail at once, and orbax waits for the first of them.
    return "exception was never retrieved" in text


@functools.cache
def quiet() -> None:
    """Drops such errors from now on; all others are logged as before."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(lambda record: not _is_raised_again(record))
    hook = sys.unraisablehook

    def without_late_results(unraisable: Any) -> None:
        """Drops the results of reads and writes that arrive after the first failure."""
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and "loop is closed" in str(error)):
            hook(unraisable)

    sys.unraisablehook = without_late_results
