"""Speedup laws: Amdahl's, Gunther's and Gustafson's, fitted to step times.

With N devices a step takes T(N) = T(1) (1 + sigma (N - 1) + kappa N (N - 1)) / N in
Gunther's law. sigma is the serial share, or contention; kappa is coherency, the cost of
every pair of devices that wait for each other. Amdahl's law has kappa = 0. Both are
linear in T(1), T(1) sigma and T(1) kappa, so a fit needs no start and no time of one
device, on which a large model does not fit.

Source: Amdahl, AFIPS 1967; Gustafson, Communications of the ACM 1988; Gunther, A
  general theory of computational scalability, arXiv:0808.1431.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np
import scipy.optimize

from meshpar.errors import MeshparError


@dataclasses.dataclass(frozen=True)
class Strong:
    """Gunther's law of one problem on more and more devices; Amdahl's if kappa is 0.

    Attributes:
      one_device: seconds per step of one device, T(1).
      sigma: share of the step that is serial, from 0 to 1.
      kappa: cost of each pair of devices, as a share of T(1).
    """

    one_device: float
    sigma: float
    kappa: float = 0.0

    def seconds(self, num_devices: float) -> float:
        """Seconds per step."""
        return self.one_device / self.speedup(num_devices)

    def speedup(self, num_devices: float) -> float:
        """T(1) / T(N)."""
        n = num_devices
        return n / (1 + self.sigma * (n - 1) + self.kappa * n * (n - 1))

    @property
    def limit(self) -> float:
        """The speedup that no number of devices exceeds."""
        if self.kappa:
            return self.speedup(max(1.0, self.best_devices))
        return 1 / self.sigma if self.sigma else math.inf

    @property
    def best_devices(self) -> float:
        """N* = sqrt((1 - sigma) / kappa), from which on more devices are slower."""
        return math.sqrt((1 - self.sigma) / self.kappa) if self.kappa else math.inf

    @property
    def half_devices(self) -> float:
        """Devices that reach half of Amdahl's limit: N = (1 - sigma) / sigma."""
        return (1 - self.sigma) / self.sigma if self.sigma else math.inf


@dataclasses.dataclass(frozen=True)
class Weak:
    """Gustafson's law of a problem that grows with the devices.

    Attributes:
      one_device: seconds per step of one device.
      serial: share of that step that does not shrink with more devices, from 0 to 1.
    """

    one_device: float
    serial: float

    def seconds(self, num_devices: float) -> float:
        """Seconds per step, of N times the work of one device."""
        return self.one_device * num_devices / self.speedup(num_devices)

    def speedup(self, num_devices: float) -> float:
        """Scaled speedup: work per second, over the work per second of one device."""
        return num_devices - self.serial * (num_devices - 1)


def fit_amdahl(times: Mapping[int, float]) -> Strong:
    """Fits Amdahl's law to times of one problem: {devices: seconds per step}.

    Errors are relative, so that small and large times count alike.

    Raises:
      MeshparError: times of less than two numbers of devices, or no positive times.
    """
    parallel, serial = _fit(times, lambda n: (1.0, n), lambda n, t: n * t)
    return Strong(parallel + serial, serial / (parallel + serial))


def fit_gunther(times: Mapping[int, float]) -> Strong:
    """Fits Gunther's law to times of one problem: {devices: seconds per step}.

    Errors are relative, so that small and large times count alike.

    Raises:
      MeshparError: times of less than three numbers of devices, or no positive times.
    """
    parallel, serial, pairs = _fit(
        times, lambda n: (1.0, n, n * (n - 1)), lambda n, t: n * t
    )
    whole = parallel + serial
    if whole <= 1e-9 * pairs:
        raise MeshparError(
            f"the times {dict(times)} grow with the square of the devices; give times "
            "of fewer devices"
        )
    return Strong(whole, serial / whole, pairs / whole)


def fit_gustafson(times: Mapping[int, float]) -> Weak:
    """Fits Gustafson's law to times of equal work per device: {devices: seconds}.

    Raises:
      MeshparError: times of less than two numbers of devices, or no positive times.
    """
    parallel, serial = _fit(times, lambda n: (1.0, 1 / n), lambda n, t: 1 / t)
    return Weak(1 / (parallel + serial), serial / (parallel + serial))


def largest_error(law: Strong | Weak, times: Mapping[int, float]) -> float:
    """The largest difference between a law and times, relative to the times."""
    return max(abs(law.seconds(n) / seconds - 1) for n, seconds in times.items())


def _fit(
    times: Mapping[int, float],
    terms: Callable[[float], tuple[float, ...]],
    value: Callable[[float, float], float],
) -> list[float]:
    """Coefficients, none negative, of terms of N that add up to a value of N and T."""
    needed = len(terms(1))
    if len(times) < needed:
        raise MeshparError(
            f"times of {sorted(times)} devices: give times of at least {needed} "
            "different numbers of devices"
        )
    for n, seconds in times.items():
        if n < 1 or not (math.isfinite(seconds) and seconds > 0):
            raise MeshparError(
                f"{seconds} seconds with {n} devices: give positive numbers"
            )
    values = np.array([value(n, t) for n, t in times.items()])
    rows = np.array([terms(n) for n in times], float) / values[:, None]
    scales = rows.max(axis=0)
    found, _ = scipy.optimize.nnls(rows / scales, np.ones(len(times)))
    return (found / scales).tolist()
