"""Files that must not change while a command reads them.

A memory map of a file that is cut ends the process (SIGBUS), and one of a file that is
written anew gives other bytes without a word. So files are read by calls, and compared
with what they were when they were opened, after every read.
"""

import contextlib
import hashlib
import logging
import os
import pathlib
import threading
import weakref
from collections.abc import Iterator

from meshpar.errors import DataError

_SAMPLES, _SAMPLE = 64, 4096
"""Number and bytes of the parts that tell a file whose time alone has changed."""


class SteadyFile:
    """A file that is open for reading, whose content is always that of its opening.

    A file that is replaced or removed under its name stays the one that was opened, and
    a warning says so.

    Attributes:
      path: the file.
      size: its bytes.
    """

    def __init__(self, path: pathlib.Path):
        """Opens a file.

        Raises:
          OSError: it cannot be opened or read.
        """
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._status, self._lock = self.status, threading.Lock()
        self.size = self._status.st_size
        self._sampled = self._sample()

    @property
    def status(self) -> os.stat_result:
        """The status of the file that is open."""
        return os.fstat(self._descriptor)

    def read(self, start: int, size: int, what: str) -> bytes:
        """The bytes [start, start + size).

        Args:
          start: the first byte.
          size: number of bytes.
          what: the part of the file, for errors.

        Raises:
          DataError: the file is not what it was when it was opened.
          OSError: the disk failed; it names the file.
        """
        content = self._read(start, size)
        status = self.status
        if status.st_size != self.size or len(content) < size:
            raise DataError(
                f"{self.path} was cut or grew while it was read: it has "
                f"{status.st_size:,} bytes and had {self.size:,}, seen at {what}; "
                "restore the file, and run the same command again"
            )
        if status.st_mtime_ns != self._status.st_mtime_ns:
            raise self._changed(what)
        with self._lock:  # Several threads read, and one of them looks.
            if status.st_ctime_ns != self._status.st_ctime_ns:
                if self._sample() != self._sampled:
                    raise self._changed(what)
                self._status = status
                self._look_at_name()
        return content

    def _changed(self, what: str) -> DataError:
        return DataError(
            f"{self.path} was written to while it was read, seen at {what}: its "
            "content may be another one; restore the file, and run the same command "
            "again, or start anew with the new content"
        )

    def _look_at_name(self) -> None:
        """Warns where the name belongs to another file, or to none."""
        with contextlib.suppress(OSError):
            if os.path.samestat(self.path.stat(), self._status):
                return
        logging.warning(
            "%s was replaced or removed; the command reads on from the file that it "
            "opened, which the next one will not find",
            self.path,
        )

    def _read(self, start: int, size: int) -> bytes:
        parts, left = [], size
        try:
            while left and (part := os.pread(self._descriptor, left, start)):
                parts.append(part)
                start, left = start + len(part), left - len(part)
        except OSError as error:  # It names no file.
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        return b"".join(parts)

    def _sample(self) -> str:
        """Hash of parts that are spread over the file."""
        digest = hashlib.sha256()
        last = max(0, self.size - _SAMPLE)
        for number in range(_SAMPLES):
            digest.update(self._read(last * number // (_SAMPLES - 1), _SAMPLE))
        return digest.hexdigest()


@contextlib.contextmanager
def read_whole(path: pathlib.Path) -> Iterator[None]:
    """A context that reads a whole file by its path.

    Raises:
      DataError: the file changed inside, so that what was read may be a part of it.
    """
    before = path.stat()
    yield
    after = path.stat()
    same = os.path.samestat(before, after)
    if not same or (before.st_size, before.st_mtime_ns) != (
        after.st_size,
        after.st_mtime_ns,
    ):
        raise DataError(
            f"{path} changed while it was read; wait until it is whole, and run the "
            "same command again"
        )
