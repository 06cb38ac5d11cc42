"""The door of a run that goes on in fewer processes: the others wait there."""

import threading
from collections.abc import Sequence

from meshpar.multihost.admission import POLL_S, Admission


def largest_number(numbers: Sequence[int], present: int) -> int:
    """The most processes that a run may have; 0 if too few are present.

    Args:
      numbers: the numbers of processes in which the run may go on.
      present: number of processes that are there.
    """
    return max((number for number in numbers if number <= present), default=0)


class Door:
    """Lets processes come to process 0 and wait while the run goes on without them."""

    def __init__(
        self, admitted: Admission, members: Sequence[int], numbers: Sequence[int]
    ):
        """Opens the door.

        Args:
          admitted: the connections, which the door looks after from now on.
          members: ranks of the processes that run, 0 among them.
          numbers: the numbers of processes in which the run may go on.
        """
        self._admitted, self._members = admitted, frozenset(members)
        self._numbers = tuple(numbers)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look_after, daemon=True)
        self._thread.start()

    def can_grow(self) -> bool:
        """Whether a restart would have more processes than run now."""
        present = len(self._members | self._admitted.alive.keys())
        return largest_number(self._numbers, present) > len(self._members)

    def close(self) -> None:
        """Closes the connections; who waits comes to the next start."""
        self._closed.set()
        self._thread.join()
        self._admitted.close()

    def _look_after(self) -> None:
        while not self._closed.is_set():
            self._admitted.poll(POLL_S)
