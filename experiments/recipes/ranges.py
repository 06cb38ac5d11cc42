"""Ranges: kinds of values that a field of a configuration or a flag may have."""

import dataclasses
import difflib
import re
from collections.abc import Sequence
from typing import Any, Protocol

from meshpar.collectives.compression import FORMATS, make_compression
from meshpar.errors import MeshparError


class Range(Protocol):
    """The values that are allowed."""

    def problem(self, value: Any) -> str:
        """The remedy for a value that is not allowed; "" for one that is."""


def _written(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


@dataclasses.dataclass(frozen=True)
class Number:
    """Numbers between two bounds; never NaN.

    Attributes:
      low: the lower bound.
      high: the upper bound.
      unit: what is counted or measured, in the plural.
      note: the meaning of a special value.
      whole: whether only whole numbers are allowed.
      above: whether `low` itself is refused.
      below: whether `high` itself is refused.
    """

    low: float
    high: float
    unit: str = ""
    note: str = ""
    whole: bool = True
    above: bool = False
    below: bool = False

    def problem(self, value: Any) -> str:
        """The remedy for a value that is not allowed; "" for one that is."""
        kinds = int if self.whole else (int, float)
        if isinstance(value, kinds) and not isinstance(value, bool):
            enough = self.low < value if self.above else self.low <= value
            if enough and (value < self.high if self.below else value <= self.high):
                return ""
        what = "a whole number" if self.whole else "a number"
        what += f" of {self.unit}" if self.unit else ""
        low = f"{'above' if self.above else 'at least'} {_written(self.low)}"
        high = f"{'below' if self.below else 'at most'} {_written(self.high)}"
        return f"use {what}, {low} and {high}" + (f"; {self.note}" if self.note else "")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A few words; "" may be one of them."""

    words: Sequence[str]

    def problem(self, value: Any) -> str:
        """The remedy for a value that is not allowed; "" for one that is."""
        if isinstance(value, str) and value in self.words:
            return ""
        *words, last = [word or "nothing" for word in self.words]
        near = difflib.get_close_matches(str(value)[:100], self.words, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"use {', '.join(words)} or {last}{hint}"


@dataclasses.dataclass(frozen=True)
class Switch:
    """True or False."""

    def problem(self, value: Any) -> str:
        """The remedy for a value that is not allowed; "" for one that is."""
        return "" if isinstance(value, bool) else "use true or false"


@dataclasses.dataclass(frozen=True)
class Text:
    """Printable texts up to a number of characters."""

    longest: int

    def problem(self, value: Any) -> str:
        """The remedy for a value that is not allowed; "" for one that is."""
        if isinstance(value, str) and len(value) <= self.longest:
            if value.isprintable():
                return ""
        return f"use at most {self.longest:,} characters, all of them printable"


@dataclasses.dataclass(frozen=True)
class Path:
    """Paths that Linux can hold; commands that open them find out if they exist."""

    longest: int = 4095
    longest_name: int = 255

    def problem(self, value: Any) -> str:
        """The remedy for a value that is not allowed; "" for one that is."""
        if isinstance(value, str) and "\0" not in value:
            path = value.encode("utf-8", "surrogateescape")
            names = map(len, path.split(b"/"))
            if len(path) <= self.longest and max(names) <= self.longest_name:
                return ""
        return (
            f"use a path of at most {self.longest:,} bytes, each name of it of at most "
            f"{self.longest_name}"
        )


@dataclasses.dataclass(frozen=True)
class Wire:
    """Names of formats of compression."""

    def problem(self, value: Any) -> str:
        """The remedy for a value that is not allowed; "" for one that is."""
        try:
            make_compression(value)
        except MeshparError:
            return f"use {FORMATS}"
        return ""


@dataclasses.dataclass(frozen=True)
class Address:
    """Addresses host:port; "" for none."""

    def problem(self, value: Any) -> str:
        """The remedy for a value that is not allowed; "" for one that is."""
        match = re.fullmatch(r"\S+:([0-9]{1,5})", value)
        if value and not (match and int(match.group(1)) < 2**16):
            return "write host:port, with a port below 65,536"
        return ""
