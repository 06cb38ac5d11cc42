"""Whether, and when, a run that has ended is started again."""

import signal

from experiments.supervision.attempt import STOPPED

PORT_TAKEN = 74
"""Exit code of process 0 when another program listens at its port."""

FINAL = {0: "done", 2: "an error of the user"}
"""{exit code: what it means} of the ends after which a run is not started again."""

_ERROR = 1
"""Exit code of Python after an uncaught error, and of libraries that end a process."""

LONGEST_S = 60.0
"""Longest pause before a restart, in seconds."""

_PORTS = 5
"""How many starts may find the port taken before they count as restarts."""


def describe(code: int) -> str:
    """An exit code in words."""
    if 128 < code < 160:
        return f"code {code} ({signal.Signals(code - 128).name})"
    return f"code {code}"


class Restarts:
    """Counts the restarts of a run and decides about the next one.

    Attributes:
      most: largest number of restarts.
      done: number of restarts so far.
      ports_taken: number of starts that found the port taken; they do not count.
      why_not: why the run is not started again; "" if nothing is to be said.
    """

    def __init__(self, most: int, backoff_s: float):
        """Begins to count.

        Args:
          most: largest number of restarts.
          backoff_s: pause before the first restart; it doubles from one to the next
            while no step is finished in between.
        """
        self.most, self._backoff = most, backoff_s
        self.done, self.ports_taken, self._in_vain = 0, 0, 0
        self._last_step: int | None = None
        self._failed_after: int | None = None
        self.why_not = ""

    def pause(self, code: int, step: int | None) -> float | None:
        """Seconds to wait before the run is started again; None for never.

        Args:
          code: exit code of the run.
          step: the last step that it finished, if any.
        """
        if code in FINAL:
            if code and self.most:
                self.why_not = f", {FINAL[code]}: not started again"
            return None
        if code == PORT_TAKEN and self.ports_taken < _PORTS:
            self.ports_taken += 1
            return self._backoff
        if code == _ERROR and step is None:
            if self.most:
                self.why_not = ", an error before its first step: not started again"
            return None
        if code != STOPPED:
            if step is not None and step == self._failed_after:
                self.why_not = f" twice after step {step}: not started again"
                return None
            self._failed_after = step
        if self.done == self.most:
            self.why_not = f" after {self.done} restarts" if self.most else ""
            return None
        self.done += 1
        if step is not None and step != self._last_step:
            self._in_vain, self._last_step = 0, step
        self._in_vain += 1
        doublings = min(self._in_vain - 1, 30)  # 2**30 is far beyond the longest.
        return min(self._backoff * 2**doublings, LONGEST_S)
