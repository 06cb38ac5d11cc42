"""Consistency models of the store: BSP, SSP(s), ASP and bounded delay.

A worker's *clock* in a range counts its pushes there. A pull at clock c is made before
the push of clock c, and a consistency model says which pushes of earlier clocks it
waits for.

Source: Valiant, BSP, CACM 1990; Ho et al., SSP, NeurIPS 2013; Li et al., Parameter
  Server, OSDI 2014, section 3.6 (bounded delay).
"""

import abc
import dataclasses
from collections.abc import Collection
from typing import Any

from meshpar.errors import StalenessError
from meshpar.settings import Range


def _check_count(name: str, value: object) -> None:
    """Raises StalenessError unless a bound is a whole number >= 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise StalenessError(f"{name}={value!r}: use a whole number >= 0")


class Consistency(abc.ABC):
    """A consistency model: when a pull may be answered.

    Attributes:
      in_rounds: whether updates are held until all workers have pushed a clock, and
        then applied as one average.
      waits: whether pulls ever wait for other workers.
    """

    in_rounds: bool = False
    waits: bool = True

    @abc.abstractmethod
    def allows(self, clock: int, clocks: Collection[int]) -> bool:
        """Whether a pull at `clock` may be answered.

        Args:
          clock: pushes that the reader has made.
          clocks: clocks of all members of the range. Where it runs in rounds, the
            number of rounds stands for every one of them.
        """


@dataclasses.dataclass(frozen=True)
class SSP(Consistency):
    """Stale synchronous parallel: no reader is more than s clocks ahead of any worker.

    A read at clock c holds every push of clock <= c - s - 1, and the reader's own. With
    s=0 the updates of a clock are applied together, as their average, in the order of
    the workers' names: this is BSP, bit for bit.

    Attributes:
      staleness: s.
    """

    staleness: int

    def __post_init__(self):
        _check_count("staleness", self.staleness)

    @property
    def in_rounds(self) -> bool:
        """Whether this is BSP."""
        return self.staleness == 0

    def allows(self, clock: int, clocks: Collection[int]) -> bool:
        return clock - min(clocks, default=clock) <= self.staleness


class BSP(SSP):
    """Bulk synchronous parallel: every read waits for the last clock of all workers."""

    def __init__(self):
        super().__init__(0)

    def __repr__(self) -> str:
        return "BSP()"


@dataclasses.dataclass(frozen=True)
class ASP(Consistency):
    """Asynchronous parallel: no read waits for another worker."""

    waits = False

    def allows(self, clock: int, clocks: Collection[int]) -> bool:
        return True


@dataclasses.dataclass(frozen=True)
class BoundedDelay(Consistency):
    """Bounded delay: a read misses at most tau pushes of earlier clocks.

    The pushes that are missing are counted over all workers, so that one worker that is
    three clocks late weighs as much as three workers that are one clock late. Tau=0
    waits for all earlier pushes; unlike BSP it applies each of them when it arrives.

    Attributes:
      tau: most pushes that may be missing.
    """

    tau: int

    def __post_init__(self):
        _check_count("tau", self.tau)

    def allows(self, clock: int, clocks: Collection[int]) -> bool:
        return sum(max(0, clock - other) for other in clocks) <= self.tau


_TEXTS = "bsp, asp, ssp:S or bounded_delay:TAU (as in ssp:2)"


def parse_consistency(text: str) -> Consistency:
    """The consistency model that a setting names.

    Args:
      text: "bsp", "asp", "ssp:S" or "bounded_delay:TAU".

    Raises:
      StalenessError: another text.
    """
    name, _, bound = text.partition(":")
    if name in ("bsp", "asp") and not bound:
        return BSP() if name == "bsp" else ASP()
    if name in ("ssp", "bounded_delay") and bound.isdecimal():
        return SSP(int(bound)) if name == "ssp" else BoundedDelay(int(bound))
    raise StalenessError(f"consistency={text!r}: use {_TEXTS}")


@dataclasses.dataclass(frozen=True)
class ConsistencyText(Range):
    """The texts that `parse_consistency` takes, up to a number of characters."""

    longest: int = 40
    in_words = _TEXTS

    def allows(self, value: Any) -> bool:
        if not isinstance(value, str) or len(value) > self.longest:
            return False
        try:
            parse_consistency(value)
        except StalenessError:
            return False
        return True
