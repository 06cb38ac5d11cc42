"""Proximal gradient at the server: the update of L1-penalized training.

Workers push two numbers per key: the gradient of their losses, and a curvature that
bounds how fast the gradient can change. The server adds them up over the workers and
moves every weight to the minimum of its quadratic model plus penalty:

    w <- soft_threshold(w - g / u, l1 / u)

A range of 2n numbers holds n weights, then n flags of the KKT filter (1 for far).

Source: Li et al., NeurIPS 2014, algorithm 3; Bradley et al., Parallel coordinate
  descent for L1-regularized loss minimization, ICML 2011; trust region of Genkin,
  Lewis, Madigan, Large-scale Bayesian logistic regression, Technometrics 2007.
"""

import numpy as np
import scipy.sparse as sp

from meshpar.islands.key_range import Contribution
from meshpar.islands.rules import UpdateFunction
from meshpar.methods.dbpg.kkt import is_far, violations

_LEAST_CURVATURE = 1e-6


def objective(margins: np.ndarray, weights: np.ndarray, l1: float) -> float:
    """Sum of the logistic losses and of the absolute weights times `l1`.

    Args:
      margins: label times score, [rows].
      weights: [keys].
      l1: weight of the penalty.
    """
    losses = np.logaddexp(0, -margins.astype(np.float64))
    return float(losses.sum() + l1 * np.abs(weights.astype(np.float64)).sum())


def gradient_and_curvature(
    columns: sp.csc_array,
    magnitudes: sp.csc_array,
    labels: np.ndarray,
    margins: np.ndarray,
    mass: np.ndarray,
) -> np.ndarray:
    """A worker's push for its columns of a block.

    The curvature of a key is that of the losses along this key, where every row counts
    with the mass of all keys that move at the same time: then all of them may move.

    Args:
      columns: [rows, keys].
      magnitudes: absolute values of `columns`.
      labels: 1 or -1, [rows].
      margins: label times score, [rows].
      mass: sum of the absolute values of a row over all keys that move, [rows].

    Returns:
      float32 [2, keys].
    """
    chances = 1 / (1 + np.exp(np.clip(margins, -500, 500)))
    gradient = columns.T @ (-labels * chances)
    curvature = magnitudes.T @ (chances * (1 - chances) * mass)
    return np.stack([gradient, curvature]).astype(np.float32)


def proximal_update(
    l1: float, num_workers: int, damping: float, kkt_ratio: float | None
) -> UpdateFunction:
    """The server-side update.

    Args:
      l1: weight of the sum of absolute weights, beside the sum of the losses.
      num_workers: pushes per round; what arrives is their average.
      damping: factor of the curvature. Below 1 it trusts that the keys of a block do
        not all push the same way.
      kkt_ratio: threshold of the KKT filter over the largest violation of the update;
        None for no filter.
    """

    def update(
        values: np.ndarray, state: dict[str, np.ndarray], pushed: Contribution
    ) -> None:
        size, half = len(values) // 2, len(pushed.keys) // 2
        if not half:
            return
        keys = pushed.keys[:half]
        gradient, curvature = num_workers * pushed.values.reshape(2, half)
        radius = state.setdefault("radius", np.ones(size, values.dtype))
        curvature = damping * curvature + _LEAST_CURVATURE
        weights = values[keys]
        target = weights - gradient / curvature
        shrunk = np.maximum(np.abs(target) - l1 / curvature, 0)
        step = np.copysign(shrunk, target) - weights
        step = np.clip(step, -radius[keys], radius[keys])
        new = weights + step
        radius[keys] = np.maximum(2 * np.abs(step), radius[keys] / 2)
        values[keys] = new
        if kkt_ratio is not None:
            threshold = kkt_ratio * float(violations(weights, gradient, l1).max())
            values[size + keys] = is_far(new, gradient, l1, threshold)

    return update
