"""Reasons why a combination is refused, read from the table of refusals.

`lower`, `generator`, planners, random layouts and the page of what goes together all
ask here. A message gives every cause once, and the nearest layout that would work.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from meshpar.errors import LayoutError
from meshpar.layouts.refusals.combination import Combination
from meshpar.layouts.refusals.refusal import Refusal

Fits = Callable[[Any], bool]
"""Whether the sizes of a layout fit."""

_MOST_CHANGES, _MOST_TRIED = 4, 64
"""Most changes, one after the other, that make the nearest layout; most layouts that
are tried."""


class Reason(NamedTuple):
    """One cause, as a combination meets it.

    Attributes:
      refusal: its record.
      given: the settings that meet it, as in a layout string.
      other: what the other lowering says, after the remedy.
    """

    refusal: Refusal
    given: str
    other: str = ""

    def __str__(self) -> str:
        return self.refusal.message(self.given) + self.other


class UnsupportedError(LayoutError):
    """A combination that the table of refusals refuses.

    Its message is made when it is read: planners refuse many layouts and read few.
    """

    def __init__(self, combination: Combination, table: Sequence[Refusal], fits: Fits):
        """Takes the arguments of `check`."""
        super().__init__()
        self._refused = combination, table, fits

    @functools.cached_property
    def reasons(self) -> tuple[Reason, ...]:
        """Every cause."""
        combination, table, _ = self._refused
        return tuple(reasons(combination, table))

    @functools.cached_property
    def _text(self) -> str:
        text = "\n  ".join(map(str, self.reasons))
        if len(self.reasons) > 1:
            layout = self._refused[0].layout
            text = f'layout "{layout}" asks for what does not go together:\n  {text}'
        near = fitting(*self._refused)
        return text + (f"\nThis layout fits: {near}" if near else "")

    def __str__(self) -> str:
        return self._text

    def __reduce__(self) -> tuple:
        return LayoutError, (self._text,)


def reasons(combination: Combination, table: Sequence[Refusal]) -> Iterator[Reason]:
    """The reasons why a combination is refused, in the order of the table.

    Args:
      combination: of layout, model and the rest.
      table: `OF_LAYOUTS`, `OF_TRAINING` or `OF_GENERATION`.
    """
    yield from _met(combination, table, "")
    own: list[Reason] = []
    for name in combination.lowerings:
        own = list(_met(combination, table, name))
        if not own:
            return
    other = _of_other(combination, table, name)
    yield from (reason._replace(other=other) for reason in own)


def first_reason(combination: Combination, table: Sequence[Refusal]) -> str:
    """The first reason why a combination is refused; "" if it is not."""
    return str(next(reasons(combination, table), ""))


def possible_lowerings(
    combination: Combination, table: Sequence[Refusal]
) -> tuple[str, ...]:
    """The lowerings that the table does not refuse for a combination."""
    names = combination.lowerings
    return tuple(name for name in names if not any(_met(combination, table, name)))


def check(
    combination: Combination,
    table: Sequence[Refusal],
    fits: Fits = lambda _: True,
) -> None:
    """Raises UnsupportedError if a combination is refused.

    Args:
      combination: of layout, model and the rest.
      table: as in `reasons`.
      fits: whether the sizes of a layout fit; asked before one is recommended.
    """
    if any(reasons(combination, table)):
        raise UnsupportedError(combination, table, fits)


def fitting(
    combination: Combination,
    table: Sequence[Refusal],
    fits: Fits = lambda _: True,
) -> str:
    """The nearest layout that fills as many devices and is not refused; "" if none.

    Takes the arguments of `check`. The records say which changes to try.
    """
    tried = {str(combination.layout)}
    tries = [combination]
    for _ in range(_MOST_CHANGES):
        further = []
        for refused in tries:
            reason = next(reasons(refused, table))
            for changes in reason.refusal.changes(refused):
                other = refused.altered(changes)
                text = str(other.layout)
                if text in tried:
                    continue
                tried.add(text)
                if any(reasons(other, table)):
                    further.append(other)
                elif fits(other.layout):
                    return text
        tries = further[: _MOST_TRIED - len(tried)] if len(tried) < _MOST_TRIED else []
    return ""


def _met(
    combination: Combination, table: Sequence[Refusal], lowering: str
) -> Iterator[Reason]:
    """Reasons that hold under one lowering alone; "" for reasons under all."""
    for refusal in table:
        if refusal.lowering == lowering and (given := refusal.given(combination)):
            yield Reason(refusal, given)


def _of_other(combination: Combination, table: Sequence[Refusal], lowering: str) -> str:
    """The other lowering as a remedy, or why it is none."""
    both = dataclasses.replace(combination, lowering="").lowerings
    names = [name for name in both if name != lowering]
    if not names:
        return ""
    (name,) = names
    if met := next(_met(combination, table, name), None):
        cause = met.refusal.cause(met.given)
        return f" (lowering={name} is not possible: {cause})"
    return f", or use lowering={name}"
