"""Vector clocks: which of two events happened before the other, or whether neither did.

Every process counts its own events, and sends its clock along with each message. The
clock of an event has, for each process, the number of that process's events that
happened before it or are itself.

Source: Lamport, CACM 1978 (happens-before); Mattern, 1989, and Fidge, 1988 (vector
  clocks); Li et al., Parameter Server, OSDI 2014, section 4.1 (a clock per range).
"""

import dataclasses
from collections.abc import Mapping

from meshpar.errors import MeshparError


@dataclasses.dataclass(frozen=True)
class VectorClock:
    """The clock of an event.

    Attributes:
      counts: {process: its events that this one has seen}; without an entry, none.

    Raises:
      MeshparError: a count that is no whole number, or negative.
    """

    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for process, count in self.counts.items():
            if not isinstance(count, int) or count < 0:
                raise MeshparError(f"{process}: {count!r} events: use whole numbers")
        seen = {process: count for process, count in self.counts.items() if count}
        object.__setattr__(self, "counts", seen)

    def tick(self, process: str) -> "VectorClock":
        """The clock of the next event of a process whose last one this is."""
        return VectorClock({**self.counts, process: self.counts.get(process, 0) + 1})

    def received(self, process: str, sent: "VectorClock") -> "VectorClock":
        """The clock of a process's next event, which is the arrival of a message.

        Args:
          process: the receiver, whose last event has this clock.
          sent: the clock of the event that sent the message.
        """
        both = {
            name: max(self.counts.get(name, 0), sent.counts.get(name, 0))
            for name in {**self.counts, **sent.counts}
        }
        return VectorClock(both).tick(process)

    def __le__(self, other: "VectorClock") -> bool:
        """Whether this event happened before another one, or has the same clock."""
        return all(n <= other.counts.get(name, 0) for name, n in self.counts.items())

    def __lt__(self, other: "VectorClock") -> bool:
        """Whether this event happened before another one."""
        return self <= other and self.counts != other.counts

    def concurrent(self, other: "VectorClock") -> bool:
        """Whether neither of two events could have known of the other."""
        return not self <= other and not other <= self
