"""The schedule of local SGD: snapshots, transfers and arrivals of every step.

Plain Python, computed on the host from the mode alone.
"""

import bisect
from collections.abc import Callable
from typing import NamedTuple, Protocol

from meshpar.errors import StalenessError


class Timing(Protocol):
    """The part of `LocalSGD` that decides when fragments are synchronized.

    Attributes:
      period: H in steps, or a function from a period's first step to its length.
      staleness: s, steps between a snapshot and its arrival.
      fragments: F.
      num_slices: S, slices of a fragment; one is scattered per step.
      gathers: whether slices are gathered after the outer step; gossip only mixes.
    """

    @property
    def period(self) -> int | Callable[[int], int]: ...
    @property
    def staleness(self) -> int: ...
    @property
    def fragments(self) -> int: ...
    @property
    def num_slices(self) -> int: ...
    @property
    def gathers(self) -> bool: ...

    def check_period(self, period: int) -> None:
        """Raises StalenessError unless the bound holds for a period."""


class Transfer(NamedTuple):
    """The slices that are exchanged during one step.

    Attributes:
      fragment: number of their fragment.
      scatter: the slice that is reduce-scattered, or None.
      gather: the slice that is gathered, or None.
      round: number of the period in which the snapshot was taken.
      taken: the step after which it was taken.
    """

    fragment: int
    scatter: int | None
    gather: int | None
    round: int
    taken: int = 0

    def kind(self, num_rounds: int) -> "Transfer":
        """The representative of all transfers that share one compiled program.

        Args:
          num_rounds: rounds of the gossip graph, 1 without gossip.
        """
        same_slice = self.scatter is not None and self.scatter == self.gather
        return Transfer(
            fragment=0,
            scatter=None if self.scatter is None else 0 if same_slice else 1,
            gather=None if self.gather is None else 0,
            round=self.round % num_rounds,
        )


class Actions(NamedTuple):
    """Everything that belongs to one step, in this order.

    Attributes:
      transfer: slices that are exchanged during the step, or None.
      arrive: the fragment that is merged into the replicas after it, or None.
      launch: fragments whose snapshot is taken after it.
      at_once: whether the fragments of `launch` are also exchanged and merged then.
      round: number of the period.
    """

    transfer: Transfer | None
    arrive: int | None
    launch: tuple[int, ...]
    at_once: bool
    round: int


class SyncSchedule:
    """The actions of every step under one mode."""

    def __init__(self, mode: Timing):
        self._mode = mode
        self._starts = [0]
        """Steps after which a period begins; period i ends at starts[i + 1]."""

    def _period_of(self, step: int) -> int:
        """The number of the period to which a step (from 1) belongs."""
        if not callable(self._mode.period):
            return (step - 1) // self._mode.period
        while self._starts[-1] < step:
            self._starts.append(self._next_start(self._mode.period))
        return bisect.bisect_left(self._starts, step) - 1

    def _next_start(self, length: Callable[[int], int]) -> int:
        """The step after which the first period that is not known yet begins."""
        start = self._starts[-1]
        period = length(start)
        self._mode.check_period(period)
        travels = self._mode.staleness and start and start - self._starts[-2] > 1
        if period == 1 and travels:
            raise StalenessError(
                f"a period of 1 begins at step {start} while a fragment travels "
                f"(staleness={self._mode.staleness}): let periods of 1 come first, as "
                "warm_up does"
            )
        return start + period

    def _bounds(self, number: int) -> tuple[int, int]:
        """The steps after which a period begins and ends."""
        if not callable(self._mode.period):
            return number * self._mode.period, (number + 1) * self._mode.period
        return self._starts[number], self._starts[number + 1]

    @property
    def starts(self) -> tuple[int, ...]:
        """Steps after which the periods computed so far begin."""
        return tuple(self._starts)

    def check_until(self, step: int) -> None:
        """Raises StalenessError if a period up to `step` violates the bound."""
        self._period_of(step)

    def launched(self, step: int) -> tuple[int, ...]:
        """Fragments whose snapshot is taken after a step."""
        if step < 1:
            return ()
        start, stop = self._bounds(self._period_of(step))
        period, count = stop - start, self._mode.fragments
        if self._all_together(step):
            return tuple(range(count))
        offsets = {(f + 1) * period // count: f for f in range(count)}
        offset = step - start
        return (offsets[offset],) if offset in offsets else ()

    def at_once(self, step: int) -> bool:
        """Whether the fragments launched after a step are also merged after it."""
        return self._mode.staleness == 0 or self._all_together(step)

    def _all_together(self, step: int) -> bool:
        """Whether a step is a period of 1, which synchronizes all fragments."""
        start, stop = self._bounds(self._period_of(step))
        return callable(self._mode.period) and stop - start == 1

    def actions(self, step: int) -> Actions:
        """The actions of a step, counted from 1.

        Raises:
          StalenessError: two fragments would travel at the same time.
        """
        s = self._mode.staleness
        transfer = arrive = None
        for age in range(1, s + 1):
            origin = step - age
            for fragment in self.launched(origin):
                if self.at_once(origin):
                    continue
                if transfer is not None:
                    raise StalenessError(
                        f"step {step}: fragments {transfer.fragment} and {fragment} "
                        f"would travel at once; lower staleness={s}"
                    )
                transfer = self._transfer(fragment, age, origin)
                arrive = fragment if age == s else None
        at_once, number = self.at_once(step), self._period_of(step)
        return Actions(transfer, arrive, self.launched(step), at_once, number)

    def _transfer(self, fragment: int, age: int, origin: int) -> Transfer:
        """The slices of a fragment that move `age` steps after its snapshot."""
        scatter = age - 1 if age <= self._mode.num_slices else None
        gather = age - 2 if age >= 2 else None
        if not self._mode.gathers:
            gather = None
        elif self._mode.staleness == 1:
            gather = 0
        return Transfer(fragment, scatter, gather, self._period_of(origin), origin)


def check_arrival(staleness: int, fragment: int, launched: int, step: int) -> None:
    """Checks the bound at run time: a snapshot arrives at most s steps after it.

    Args:
      staleness: s.
      fragment: number of the fragment that arrives.
      launched: the step after which its snapshot was taken, -1 if never.
      step: the step after which it arrives.

    Raises:
      StalenessError: the snapshot is too old, or was never taken.
    """
    if launched < 0 or step - launched > staleness:
        taken = f"was taken at step {launched}" if launched >= 0 else "was never taken"
        raise StalenessError(
            f"step {step}: fragment {fragment} arrives, but its snapshot {taken}; the "
            f"bound is staleness={staleness}"
        )
