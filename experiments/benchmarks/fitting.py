"""Fits numbers to measured times, by least squares of the logarithms of ratios."""

from collections.abc import Callable

import numpy as np
from scipy import optimize

_STEP = 1e-3
"""By what share of itself a number is changed to see what it adds to a time."""

_LEAST = 1e-9
"""Time that a prediction has at least, so that it has a logarithm."""


def fitted(
    times: Callable[[np.ndarray], np.ndarray],
    start: np.ndarray,
    measured: np.ndarray,
    most: float = np.inf,
    rounds: int = 1,
) -> np.ndarray:
    """The numbers with which predictions fit best; outliers count less.

    Args:
      times: predicted times [rows] of numbers [N].
      start: numbers to begin with [N].
      measured: times [rows].
      most: the largest number that is tried; the least is 0.
      rounds: times that the predictions are taken as linear in the numbers, about the
        last best ones; one is enough if they are.
    """
    best = start
    for _ in range(rounds):
        best = _fitted(times, best, measured, most)
    return best


def _fitted(
    times: Callable[[np.ndarray], np.ndarray],
    start: np.ndarray,
    measured: np.ndarray,
    most: float,
) -> np.ndarray:
    first, steps = times(start), np.diag(np.maximum(_STEP * start, _STEP))
    slopes = np.stack([times(start + step) - first for step in steps], axis=1)
    slopes /= steps.diagonal()

    def errors(numbers: np.ndarray) -> np.ndarray:
        moved = first + slopes @ (numbers - start)
        return np.log(np.maximum(moved, _LEAST)) - np.log(measured)

    found = optimize.least_squares(
        errors, start, bounds=(0.0, most), loss="soft_l1", f_scale=0.1, x_scale="jac"
    )
    return found.x


def summary(predicted: np.ndarray, measured: np.ndarray) -> str:
    """Mean and extremes of relative errors, in words.

    Args:
      predicted: times [rows].
      measured: times [rows].
    """
    errors = predicted / measured - 1
    mean, low, high = np.mean(np.abs(errors)), min(errors), max(errors)
    return f"mean error {mean:.1%}, {low:+.1%} to {high:+.1%}"
