"""One record of the table of refusals, and the words that its records are made of."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

from meshpar.layouts.axes import DATA, FSDP
from meshpar.layouts.layer_uses import splits_rows
from meshpar.layouts.mixes import is_mix
from meshpar.layouts.offload import NONE, PARAMETERS
from meshpar.layouts.refusals.combination import Combination

Changes = dict[str, Any]
"""{field of the layout: its new value}."""

ROW_LAYERS = f"layers={FSDP}"
"""Layers whose devices along `tensor` have rows of their own, in a layout string."""


def _no_changes(combination: Combination) -> Iterable[Changes]:
    """No other layout helps."""
    del combination
    return ()


@dataclasses.dataclass(frozen=True)
class Refusal:
    """One cause for which combinations are refused.

    Attributes:
      feature: what is asked for, as it stands in a layout string.
      beside: what it does not go with.
      given: the settings of a combination that meet the cause, or "".
      why: the cause.
      remedy: in words.
      changes: changes of the layout that may help, the nearest first; they keep the
        number of devices.
      lowering: the lowering that alone refuses it; "" for all.
      says_all: whether `given` has cause and remedy itself, with numbers.
    """

    feature: str
    beside: str
    given: Callable[[Combination], str]
    why: str
    remedy: str
    changes: Callable[[Combination], Iterable[Changes]] = _no_changes
    lowering: str = ""
    says_all: bool = False

    def cause(self, given: str) -> str:
        """The cause, as some settings meet it."""
        return given if self.says_all else f"{given}: {self.why}"

    def message(self, given: str) -> str:
        """Cause and remedy, as some settings meet it."""
        return given if self.says_all else f"{self.cause(given)}; {self.remedy}"


# The settings of a combination, and changes of its layout.


def both(settings: Iterable[str], others: Iterable[str]) -> str:
    """Names the settings of two sides; "" unless both have some."""
    left, right = ", ".join(settings), ", ".join(others)
    return f"{left} with {right}" if left and right else ""


def sizes(c: Combination, *axes: str) -> list[str]:
    """The axes with more than one device, as in a layout string."""
    return [f"{axis}={n}" for axis in axes if (n := getattr(c.layout, axis)) > 1]


def left_out(c: Combination, *names: str) -> Changes:
    """The fields with their defaults."""
    return {name: c.default(name) for name in names}


def as_data(c: Combination, *axes: str) -> Changes:
    """The devices of the axes along `data`."""
    count = math.prod(getattr(c.layout, axis) for axis in {DATA, *axes})
    return {**dict.fromkeys(axes, 1), DATA: count}


def leaves_out(*names: str) -> Callable[[Combination], Iterable[Changes]]:
    """Changes that leave fields of the layout out."""
    return lambda c: [left_out(c, *names)]


def row_layers(c: Combination) -> list[str]:
    """The setting by which layers split rows over `tensor`, if they do."""
    return c.settings("layers") if splits_rows(c.layout.layers) else []


def policies_by_layer(c: Combination) -> list[str]:
    """The setting that gives layers policies of their own, if any does."""
    return c.settings("remat") if is_mix(c.layout.remat) else []


def offloads(c: Combination, *parts: str) -> list[str]:
    """The setting that moves any of these parts to host memory, if any does."""
    return c.settings("offload") if c.layout.offloaded & set(parts) else []


def kept_resident(c: Combination) -> Iterable[Changes]:
    """Weights that stream as they are gathered, or that stay on the device."""
    if c.layout.fsdp > 1:
        yield {"zero": 3}
    kept = [part for part in c.layout.offload.split("+") if part != PARAMETERS]
    yield {"offload": "+".join(kept) or NONE}
