"""Read problems: why checkpoints could not be read, and in which processes."""

import enum
import errno
import functools
import logging
from collections.abc import Iterable
from typing import NamedTuple

import jax

from meshpar.multihost.agree import READ_S, allgather_objects


class Kind(enum.StrEnum):
    """Kinds of read problems.

    OTHER: the checkpoint is of another model or optimizer.
    TRANSIENT: the checkpoint may be intact: memory, permissions or disk failed.
    CORRUPT: the checkpoint is not what was written.
    NOT_FINITE: it is what was written, and a number of it is none.
    """

    OTHER = enum.auto()
    TRANSIENT = enum.auto()
    CORRUPT = enum.auto()
    NOT_FINITE = enum.auto()


class Problem(NamedTuple):
    """A problem of one process with reading a checkpoint."""

    kind: Kind
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "Problem":
        """The root cause of an error, in one line."""
        while error.__cause__ is not None:
            error = error.__cause__
        text = f"{type(error).__name__}: {error}".split("\n")[0][:300]
        transient = (
            "RESOURCE_EXHAUSTED",
            "PERMISSION_DENIED",
            "UNAVAILABLE",
            "DEADLINE_",
        )
        if (
            isinstance(error, MemoryError)
            or (isinstance(error, OSError) and error.errno not in (None, errno.ENOENT))
            or any(word in text for word in transient)
        ):
            return cls(Kind.TRANSIENT, text)
        return cls(Kind.CORRUPT, text)


class Problems:
    """The problems of all processes with one checkpoint; false if there are none."""

    def __init__(self, by_process: Iterable[tuple[int, Problem]]):
        """Groups (process, problem) pairs by problem."""
        self._processes: dict[Problem, list[int]] = {}
        for process, problem in by_process:
            self._processes.setdefault(problem, []).append(process)

    @classmethod
    def gather(cls, own: Problem | None) -> "Problems":
        """Gathers the problem of every process, None without one; all call it."""
        gathered = allgather_objects("checkpoint read", own, READ_S)
        return cls(
            (process, Problem(Kind(problem[0]), problem[1]))
            for process, problem in gathered.items()
            if problem is not None
        )

    @classmethod
    def everywhere(cls, problem: Problem) -> "Problems":
        """One problem that every process has seen."""
        return cls((process, problem) for process in range(jax.process_count()))

    def __bool__(self) -> bool:
        return bool(self._processes)

    def any(self, kind: Kind) -> bool:
        """Whether some process has a problem of this kind."""
        return any(problem.kind is kind for problem in self._processes)

    def __str__(self) -> str:
        if jax.process_count() == 1 and list(self._processes.values()) == [[0]]:
            return next(iter(self._processes)).text
        return "; ".join(
            f"process(es) {processes}: {problem.text}"
            for problem, processes in self._processes.items()
        )


@functools.cache
def warn_once(text: str) -> None:
    """Logs a warning about a file that is tried several times, with one outcome."""
    logging.warning("%s", text)
