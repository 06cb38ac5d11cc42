"""Why checkpoints could not be read, in which processes, and what follows from it."""

import enum
import errno
from collections.abc import Iterable
from typing import NamedTuple

import jax

from meshpar.multihost.agree import READ_S, allgather_objects


class Kind(enum.StrEnum):
    """What is wrong.

    OTHER: the checkpoint is of another model or optimizer.
    PASSING: perhaps nothing is wrong with it: memory, rights, a disk that is away.
    CORRUPT: it is not what was written.
    """

    OTHER = enum.auto()
    PASSING = enum.auto()
    CORRUPT = enum.auto()


class Problem(NamedTuple):
    """Why a process could not read a checkpoint."""

    kind: Kind
    text: str

    @classmethod
    def of(cls, error: BaseException) -> "Problem":
        """The cause of an error, in one line."""
        while error.__cause__ is not None:
            error = error.__cause__
        text = f"{type(error).__name__}: {error}".split("\n")[0][:300]
        passing = (
            "RESOURCE_EXHAUSTED",
            "PERMISSION_DENIED",
            "UNAVAILABLE",
            "DEADLINE_",
        )
        if (
            isinstance(error, MemoryError)
            or (isinstance(error, OSError) and error.errno not in (None, errno.ENOENT))
            or any(word in text for word in passing)
        ):
            return cls(Kind.PASSING, text)
        return cls(Kind.CORRUPT, text)


class Problems:
    """The problems of all processes with one checkpoint; false if there are none."""

    def __init__(self, found: Iterable[tuple[int, Problem]]):
        self._processes: dict[Problem, list[int]] = {}
        for process, problem in found:
            self._processes.setdefault(problem, []).append(process)

    @classmethod
    def told(cls, own: Problem | None) -> "Problems":
        """Tells the other processes one's own problem, and hears theirs."""
        heard = allgather_objects("checkpoint read", own, READ_S)
        return cls(
            (process, Problem(Kind(told[0]), told[1]))
            for process, told in heard.items()
            if told is not None
        )

    @classmethod
    def everywhere(cls, problem: Problem) -> "Problems":
        """A problem that all processes know of."""
        return cls((process, problem) for process in range(jax.process_count()))

    def __bool__(self) -> bool:
        return bool(self._processes)

    def any(self, kind: Kind) -> bool:
        """Whether some process has one of this kind."""
        return any(problem.kind is kind for problem in self._processes)

    def __str__(self) -> str:
        if jax.process_count() == 1 and list(self._processes.values()) == [[0]]:
            return next(iter(self._processes)).text
        return "; ".join(
            f"process(es) {who}: {problem.text}"
            for problem, who in self._processes.items()
        )
