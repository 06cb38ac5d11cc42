"""Line search of Moré and Thuente: a step that decreases enough and flattens the slope.

It is told the value and the slope at one step after the other, and answers with the
next step to try. It needs no vectors, so a coordinator can run it.

Source: Moré, Thuente, Line search algorithms with guaranteed sufficient decrease, ACM
  TOMS 1994; the constants are those of L-BFGS-B (Zhu, Byrd, Lu, Nocedal, 1997).
"""

import dataclasses
import math

_DECREASE, _FLATTENING, _WIDTH = 1e-3, 0.9, 0.1
_LARGEST = 1e10


@dataclasses.dataclass
class _Point:
    """A step with the value and the slope there."""

    step: float
    value: float
    slope: float


class LineSearch:
    """The search along one direction.

    Args:
      value: at step 0.
      slope: at step 0, below 0.
      step: the first one to try.

    Attributes:
      step: to evaluate next, or the result.
      done: whether `step` is the result.
    """

    def __init__(self, value: float, slope: float, step: float):
        self.step, self.done = step, False
        self._value, self._slope = value, slope
        self._best = _Point(0.0, value, slope)
        self._other = _Point(0.0, value, slope)
        self._bracketed, self._first_stage = False, True
        self._low, self._high = 0.0, 5 * step
        self._width, self._width_before = _LARGEST, 2 * _LARGEST

    def tell(self, value: float, slope: float) -> None:
        """Takes value and slope at `step`; changes `step`, or says that it is done."""
        required = _DECREASE * self._slope
        limit = self._value + self.step * required
        if self._first_stage and value <= limit and slope >= 0:
            self._first_stage = False
        narrow = self._high - self._low <= _WIDTH * self._high
        outside = not self._low < self.step < self._high
        stuck = self._bracketed and (outside or narrow)
        good = value <= limit and abs(slope) <= _FLATTENING * -self._slope
        if good or stuck or (self.step == _LARGEST and value <= limit):
            self.done = True
            return
        here = _Point(self.step, value, slope)
        if self._first_stage and value <= self._best.value and value > limit:
            # Minimizes the value minus the required decrease, which is easier here.
            best, other, here = (
                _Point(p.step, p.value - p.step * required, p.slope - required)
                for p in (self._best, self._other, here)
            )
            best, other, step = self._narrow(best, other, here)
            self._best, self._other = (
                _Point(p.step, p.value + p.step * required, p.slope + required)
                for p in (best, other)
            )
        else:
            self._best, self._other, step = self._narrow(self._best, self._other, here)
        self._choose(step)

    def _choose(self, step: float) -> None:
        """Keeps the interval shrinking, and the next step inside it."""
        best, other = self._best.step, self._other.step
        if self._bracketed:
            width = abs(other - best)
            if width >= 0.66 * self._width_before:
                step = best + 0.5 * (other - best)
            self._width_before, self._width = self._width, width
            self._low, self._high = min(best, other), max(best, other)
        else:
            self._low = step + 1.1 * (step - best)
            self._high = step + 4 * (step - best)
        step = min(max(step, 0.0), _LARGEST)
        narrow = self._high - self._low <= _WIDTH * self._high
        if self._bracketed and (not self._low < step < self._high or narrow):
            step = best
        self.step = step

    def _narrow(
        self, best: _Point, other: _Point, here: _Point
    ) -> tuple[_Point, _Point, float]:
        """The new interval of points that holds a minimum, and the next step."""
        opposite = here.slope * math.copysign(1.0, best.slope) < 0
        step = self._next_step(best, other, here, opposite)
        if here.value > best.value:
            return best, here, step
        return here, (best if opposite else other), step

    def _next_step(
        self, best: _Point, other: _Point, here: _Point, opposite: bool
    ) -> float:
        """The next step by cubic and quadratic interpolation; section 4 of the source.

        It also notes when the interval is known to hold a minimum.
        """
        if here.value > best.value:  # Case 1: the minimum lies between.
            self._bracketed = True
            cubic = _cubic(best, here)
            drop = (best.value - here.value) / (here.step - best.step) + best.slope
            quadratic = best.step + best.slope / drop / 2 * (here.step - best.step)
            if abs(cubic - best.step) < abs(quadratic - best.step):
                return cubic
            return cubic + (quadratic - cubic) / 2
        if opposite:  # Case 2: the slope changed its sign.
            self._bracketed = True
            cubic, secant = _cubic(here, best), _secant(here, best)
            far = abs(cubic - here.step) > abs(secant - here.step)
            return cubic if far else secant
        if abs(here.slope) < abs(best.slope):  # Case 3: the slope flattens.
            return self._extrapolate(best, other, here)
        if self._bracketed:  # Case 4: it gets steeper.
            return _cubic(here, other)
        return self._high if here.step > best.step else self._low

    def _extrapolate(self, best: _Point, other: _Point, here: _Point) -> float:
        cubic = _cubic(here, best, self._low, self._high)
        secant = _secant(here, best)
        nearer = abs(cubic - here.step) < abs(secant - here.step)
        if self._bracketed:
            step = cubic if nearer else secant
            end = here.step + 0.66 * (other.step - here.step)
            return min(end, step) if here.step > best.step else max(end, step)
        step = secant if nearer else cubic
        return min(max(step, self._low), self._high)


def _secant(here: _Point, there: _Point) -> float:
    """The zero of the slope by the secant through two points."""
    share = here.slope / (here.slope - there.slope)
    return here.step + share * (there.step - here.step)


def _cubic(
    here: _Point, there: _Point, low: float | None = None, high: float | None = None
) -> float:
    """Minimum of the cubic through two points with their slopes.

    With bounds, a cubic without a minimum beyond `here` gives the bound in the
    direction of the search.
    """
    theta = 3 * (there.value - here.value) / (here.step - there.step)
    theta += here.slope + there.slope
    scale = max(abs(theta), abs(here.slope), abs(there.slope))
    root = (theta / scale) ** 2 - here.slope / scale * (there.slope / scale)
    gamma = scale * math.sqrt(max(0.0, root))
    if here.step > there.step:
        gamma = -gamma
    p = gamma - here.slope + theta
    if high is None:
        r = p / (gamma - here.slope + gamma + there.slope)
        return here.step + r * (there.step - here.step)
    r = p / (gamma + (there.slope - here.slope) + gamma)
    if r < 0 and gamma != 0:
        return here.step + r * (there.step - here.step)
    return high if here.step > there.step else low
