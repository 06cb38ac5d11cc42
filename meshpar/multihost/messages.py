"""Messages of the start: from a process that arrives, and the answers to it.

One reader serves all of them, and takes exactly what the fields say: every key once and
no other, whole numbers that are no floats and no booleans, short texts.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self, get_type_hints

_HIGHEST = 2**31 - 1
"""Highest number in a message."""

_LONGEST = 1000
"""Most characters of a text in a message."""


class Message:
    """A message, whose fields are numbers from 0, booleans and texts."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self | None:
        """The message with some content; None if it has another form.

        Args:
          content: {name of a field: value}.
        """
        kinds = get_type_hints(cls)
        if content.keys() != kinds.keys():
            return None
        for name, kind in kinds.items():
            value = content[name]
            if type(value) is not kind:  # True is an int, but no number of a process.
                return None
            if kind is int and not 0 <= value <= _HIGHEST:
                return None
            if kind is str and not (len(value) <= _LONGEST and value.isprintable()):
                return None  # Half of a surrogate pair, among others, has no bytes.
        return cls(**content)

    @property
    def content(self) -> dict[str, Any]:
        """{name of a field: value}."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Hello(Message):
    """A process is there.

    Attributes:
      process: its rank.
      num: the number of processes that it expects.
      challenge: what the answer has to prove.
    """

    process: int
    num: int
    challenge: str


@dataclasses.dataclass(frozen=True)
class Place(Message):
    """The place of the process in the run, which begins.

    Attributes:
      coordinator: host:port of jax.distributed.
      num: processes of the run.
      process: rank of this process.
    """

    coordinator: str
    num: int
    process: int


@dataclasses.dataclass(frozen=True)
class Refusal(Message):
    """The run does not begin.

    Attributes:
      problem: why.
      missing: whether processes are missing, so that another try may help.
    """

    problem: str
    missing: bool
