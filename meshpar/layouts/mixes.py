"""Mixes: values of a layout that give consecutive layers choices of their own.

`12*full+10*none` is the choice full for the first 12 layers and none for the last 10.
A value without counts is one choice for all layers; the functions read both alike.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

from meshpar.errors import LayoutError, nearest, shown

_MOST = 999_999
"""Most layers of one term."""


def is_mix(value: str) -> bool:
    """Whether a value that is canonical gives layers choices of their own."""
    return value[:1].isdigit()


def terms(mix: str) -> list[tuple[str, int]]:
    """[(choice, number of layers)] of a mix."""
    parts = (term.split("*") for term in mix.split("+"))
    return [(choice, int(count)) for count, choice in parts]


def segments(value: str, depth: int) -> tuple[tuple[str, int], ...]:
    """(choice, number of layers) of consecutive layers, in the order in which they run.

    Args:
      value: a mix, or one choice.
      depth: number of layers of the stack; a mix gives its own (`reason_depth`).
    """
    return tuple(terms(value)) if is_mix(value) else ((value, depth),)


def average(value: str, depth: int, of_choice: Callable[[str], Any]) -> Any:
    """The mean over all layers of of_choice(choice).

    Args:
      value: a mix, or one choice.
      depth: number of layers of the stack.
      of_choice: a number for each choice, such as the seconds of a layer.
    """
    if not is_mix(value):
        return of_choice(value)
    return sum(count * of_choice(choice) for choice, count in terms(value)) / depth


def written(choices: Sequence[tuple[str, int]]) -> str:
    """The value of (choice, number of layers) of consecutive layers.

    Neighbours with one choice are merged.
    """
    merged = [
        (choice, sum(count for _, count in group))
        for choice, group in itertools.groupby(choices, lambda term: term[0])
    ]
    if len(merged) == 1:
        return merged[0][0]
    return "+".join(f"{count}*{choice}" for choice, count in merged)


def canonical_mix(
    option: str, mix: str, known: Sequence[str], what: str, example: str
) -> str:
    """The canonical form of COUNT*CHOICE+COUNT*CHOICE.

    Args:
      option: the layout's option, for errors.
      mix: its value.
      known: the choices.
      what: what a choice is called, such as "policy".
      example: a mix, for errors.

    Raises:
      LayoutError: a malformed term, a choice that does not exist, or one choice for all
        layers.
    """
    given = f"{option}={shown(mix)}"
    for term in mix.split("+"):
        count, _, choice = term.partition("*")
        if not re.fullmatch("0*[1-9][0-9]{0,5}", count):  # Up to _MOST.
            raise LayoutError(
                f"{given}: {shown(term)!r} gives no number of layers from 1 to "
                f"{_MOST}; write COUNT*{what.upper()}, joined by +, such as "
                f"{example}"
            )
        if choice not in known:
            raise LayoutError(
                f"{given}: {shown(choice)!r} ({nearest(shown(choice), known)})"
            )
    canonical = written(terms(mix))
    if not is_mix(canonical):
        count = sum(count for _, count in terms(mix))
        raise LayoutError(
            f"{given} gives all {count} layers one {what}; write {option}={canonical}"
        )
    if (count := max(count for _, count in terms(canonical))) > _MOST:
        raise LayoutError(
            f"{given} gives {count} layers in a row one {what}; use at most {_MOST}"
        )
    return canonical


def reason_depth(option: str, value: str, depth: int, pattern: int) -> str:
    """A reason why a mix does not fit a model; "" if it does.

    Args:
      option: the layout's option.
      value: its value.
      depth: number of layers of the stack.
      pattern: number of the model's own layers that each of them runs.
    """
    named = sum(count for _, count in segments(value, depth))
    if named == depth:
        return ""
    unit = "layers" if pattern == 1 else f"runs of its pattern of {pattern} layers"
    return (
        f"{option}={value} names {named} {unit}, the model has {depth}; give counts "
        f"that add up to {depth}, or one value for all of them"
    )
