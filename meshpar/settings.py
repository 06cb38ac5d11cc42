"""Settings: fields of dataclasses that carry their range and their help.

A range hangs on the type of the field, `Annotated[int, Number(1, 8, "workers")]`, and
the help is the field's entry in the docstring, under "Attributes:". Errors, flags and
settings of commands and the tables of the docs read both from there.
"""

import abc
import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import re
import typing
from collections.abc import Collection, Sequence
from typing import Any

from meshpar.errors import MeshparError, shown

SMALLEST, LARGEST = 1e-30, 3e38
"""Positive numbers that float32 holds, and so do their inverses or squares alone."""


class Range(abc.ABC):
    """The values that a field of a configuration or a flag may have."""

    @property
    @abc.abstractmethod
    def in_words(self) -> str:
        """The values as words that follow "use"."""

    @abc.abstractmethod
    def allows(self, value: Any) -> bool:
        """Whether a value is in the range."""

    def problem(self, value: Any) -> str:
        """The remedy for a value that is not allowed; "" for one that is."""
        return "" if self.allows(value) else f"use {self.in_words}"


def _written(bound: float) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


@dataclasses.dataclass(frozen=True)
class Number(Range):
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

    @property
    def in_words(self) -> str:
        what = "a whole number" if self.whole else "a number"
        what += f" of {self.unit}" if self.unit else ""
        if self.low == -math.inf and self.high == math.inf:
            return what
        low = f"{'above' if self.above else 'at least'} {_written(self.low)}"
        high = f"{'below' if self.below else 'at most'} {_written(self.high)}"
        return f"{what}, {low} and {high}" + (f"; {self.note}" if self.note else "")

    def allows(self, value: Any) -> bool:
        kind = numbers.Integral if self.whole else numbers.Real
        if not isinstance(value, kind) or isinstance(value, bool):
            return False
        enough = self.low < value if self.above else self.low <= value
        return bool(
            enough and (value < self.high if self.below else value <= self.high)
        )


def real(
    low: float, high: float, unit: str = "", note: str = "", **bounds: bool
) -> Number:
    """The range of numbers that need not be whole; arguments as for `Number`."""
    return Number(low, high, unit, note, whole=False, **bounds)


@dataclasses.dataclass(frozen=True)
class Choice(Range):
    """A few words; "" may be one of them."""

    words: Sequence[str]

    @property
    def in_words(self) -> str:
        *words, last = [word or "nothing" for word in self.words]
        of = "one of " if len(words) > 1 else ""
        return f"{of}{', '.join(words)} or {last}"

    def allows(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.words

    def problem(self, value: Any) -> str:
        """Why a value is outside, with the nearest word; "" if it is inside."""
        if not (remedy := super().problem(value)):
            return ""
        near = difflib.get_close_matches(str(value)[:100], self.words, n=1)
        return remedy + (f"; did you mean {near[0]!r}?" if near else "")


@dataclasses.dataclass(frozen=True)
class Switch(Range):
    """True or False."""

    in_words = "true or false"

    def allows(self, value: Any) -> bool:
        return isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class Text(Range):
    """Printable texts up to a number of characters."""

    longest: int

    @property
    def in_words(self) -> str:
        return f"at most {self.longest:,} characters, all of them printable"

    def allows(self, value: Any) -> bool:
        return (
            isinstance(value, str)
            and len(value) <= self.longest
            and value.isprintable()
        )


@dataclasses.dataclass(frozen=True)
class Path(Range):
    """Paths that Linux can hold; commands that open them find out if they exist."""

    longest: int = 4095
    longest_name: int = 255

    @property
    def in_words(self) -> str:
        return (
            f"a path of at most {self.longest:,} bytes, each name of it of at most "
            f"{self.longest_name}"
        )

    def allows(self, value: Any) -> bool:
        if not isinstance(value, str) or "\0" in value:
            return False
        path = value.encode("utf-8", "surrogateescape")
        names = map(len, path.split(b"/"))
        return len(path) <= self.longest and max(names) <= self.longest_name


@dataclasses.dataclass(frozen=True)
class Instance(Range):
    """Objects of a class, or of one of several.

    Attributes:
      kind: a class or a union of classes.
      made_by: what makes such an object.
    """

    kind: Any
    made_by: str

    @property
    def in_words(self) -> str:
        return self.made_by

    def allows(self, value: Any) -> bool:
        return isinstance(value, self.kind)


@functools.cache
def ranges(kind: type) -> dict[str, Range]:
    """{field of a dataclass: its range}, for the fields that have one."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {
        field.name: extra
        for field in dataclasses.fields(kind)
        for extra in getattr(hints[field.name], "__metadata__", ())
        if isinstance(extra, Range)
    }


def range_of(kind: Any) -> Range:
    """The range of a type without one of its own: all of its values.

    Raises:
      MeshparError: the type is none of bool, int, float, str and `typing.Literal`.
    """
    if typing.get_origin(kind) is typing.Literal:
        words = typing.get_args(kind)
        if all(isinstance(word, str) for word in words):
            return Choice(words)
    found = {
        bool: Switch(),
        int: Number(-math.inf, math.inf),
        float: real(-LARGEST, LARGEST),
        str: Text(10_000),
    }
    if kind not in found:
        raise MeshparError(
            f"a setting of type {getattr(kind, '__name__', kind)}: use bool, int, "
            "float, str, a Literal of texts, or a dataclass of these"
        )
    return found[kind]


def helps(kind: type) -> dict[str, str]:
    """{field of a dataclass: its entry under "Attributes:" in a docstring}.

    Fields of a base class have their entries there.
    """
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        found |= entries(owner.__doc__ or "", "Attributes")
    return found


def entries(docstring: str, section: str) -> dict[str, str]:
    """{name: text} of a section of a Google-style docstring, such as "Args"."""
    _, _, rest = inspect.cleandoc(docstring).partition(f"\n{section}:\n")
    inside, *_ = re.split(r"^\S", rest, maxsplit=1, flags=re.MULTILINE)
    found = re.findall(r"^  +(\w+): (.*(?:\n    .*)*)", inside, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def check(
    settings: Any,
    subject: str = "",
    error: type[MeshparError] = MeshparError,
    but: Collection[str] = (),
) -> None:
    """Raises an error, with the remedy, for the first field outside of its range.

    Args:
      settings: a dataclass.
      subject: begins the message, such as "islands: ".
      error: the class of the error.
      but: fields that are not looked at.
    """
    for name, allowed in ranges(type(settings)).items():
        value = getattr(settings, name)
        if name not in but and (problem := allowed.problem(value)):
            raise error(f"{subject}{name}={shown(repr(value))}: {problem}")
