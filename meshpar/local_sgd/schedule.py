"""The schedule of local SGD: what happens in every step."""

import functools
from typing import Any, NamedTuple

from meshpar.errors import StalenessError


class Transfer(NamedTuple):
    """What moves beside one step.

    Attributes:
      fragment: which fragment.
      scatter: the chunk whose average is taken, or None.
      gather: the chunk that is handed out, or None.
      round: number of the period in which the snapshot was taken.
      taken: the step after which it was taken.
    """

    fragment: int
    scatter: int | None
    gather: int | None
    round: int
    taken: int = 0


class Actions(NamedTuple):
    """What belongs to one step, in this order.

    Attributes:
      transfer: what moves beside it, or None.
      arrive: the fragment that reaches the replicas after it, or None.
      launch: fragments whose snapshot is taken after it.
      at_once: whether these arrive there, too.
      round: number of the period.
    """

    transfer: Transfer | None
    arrive: int | None
    launch: tuple[int, ...]
    at_once: bool
    round: int


class Schedule:
    """What happens in every step, from the mode alone; plain Python."""

    def __init__(self, mode: Any):
        """Makes the schedule of a mode."""
        self._mode = mode
        self._starts = [0]
        """Steps after which a period begins; period i ends at starts[i + 1]."""

    def _period_of(self, step: int) -> int:
        """The period to which step (from 1) belongs."""
        if not callable(self._mode.period):
            return (step - 1) // self._mode.period
        while self._starts[-1] < step:
            start = self._starts[-1]
            period = self._mode.period(start)
            self._mode.check_period(period)
            late = self._mode.staleness and start and start - self._starts[-2] > 1
            if period == 1 and late:
                raise StalenessError(
                    f"a period of 1 begins at step {start} while a fragment travels "
                    f"(staleness={self._mode.staleness}): let periods of 1 come first, "
                    "as warm_up does"
                )
            self._starts.append(start + period)
        low, high = 0, len(self._starts) - 1
        while high - low > 1:  # The last start below step.
            middle = (low + high) // 2
            low, high = (middle, high) if self._starts[middle] < step else (low, middle)
        return low

    def _bounds(self, number: int) -> tuple[int, int]:
        if not callable(self._mode.period):
            return number * self._mode.period, (number + 1) * self._mode.period
        return self._starts[number], self._starts[number + 1]

    @property
    def starts(self) -> tuple[int, ...]:
        """Steps after which the periods looked at so far begin."""
        return tuple(self._starts)

    def check_until(self, step: int) -> None:
        """Raises StalenessError if a period up to `step` breaks the bound."""
        self._period_of(step)

    def launched(self, step: int) -> tuple[int, ...]:
        """Fragments whose snapshot is taken after a step."""
        if step < 1:
            return ()
        start, stop = self._bounds(self._period_of(step))
        period, count = stop - start, self._mode.fragments
        if self._together(step):
            return tuple(range(count))
        offsets = {(f + 1) * period // count: f for f in range(count)}
        found = offsets.get(step - start)
        return () if found is None else (found,)

    def at_once(self, step: int) -> bool:
        """Whether what is launched after a step arrives there too."""
        return self._mode.staleness == 0 or self._together(step)

    def _together(self, step: int) -> bool:
        """Whether the step is a period of its own, synchronized whole."""
        start, stop = self._bounds(self._period_of(step))
        return callable(self._mode.period) and stop - start == 1

    @functools.lru_cache(maxsize=4096)  # noqa: B019
    def actions(self, step: int) -> Actions:
        """What happens in a step, counted from 1.

        Raises:
          StalenessError: two fragments would travel at once.
        """
        s = self._mode.staleness
        transfer = arrive = None
        for age in range(1, s + 1):
            origin = step - age
            for fragment in self.launched(origin) if origin > 0 else ():
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
        scatter = age - 1 if age <= self._mode.num_chunks else None
        gather = age - 2 if age >= 2 else None
        if self._mode.gossip is not None:
            gather = None
        elif self._mode.staleness == 1:
            gather = 0
        return Transfer(fragment, scatter, gather, self._period_of(origin), origin)


def check_arrival(mode: Any, fragment: int, launched: int, step: int) -> None:
    """The running bound: a snapshot arrives at most s steps after it was taken.

    Raises:
      StalenessError: it is late, or was never taken.
    """
    if launched < 0 or step - launched > mode.staleness:
        taken = f"was taken at step {launched}" if launched >= 0 else "was never taken"
        raise StalenessError(
            f"step {step}: fragment {fragment} arrives, but its snapshot {taken}; the "
            f"bound is staleness={mode.staleness}"
        )
