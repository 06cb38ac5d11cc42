"""Rates of gradient descent and SGD on data-parallel workers, beside closed forms."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshpar
from meshpar.arrays import Array

_ROWS, _DIMS, _DEVICES = 256, 4, 8
_STIFF, _MILD = np.geomspace(0.1, 1, _DIMS), np.geomspace(0.5, 1, _DIMS)
"""Curvatures of least squares: from mu to L."""


class Descent(nnx.Module):
    """Weights of runs that do not know of each other, [runs, dims]."""

    def __init__(self, runs: int, dims: int, rngs: nnx.Rngs):
        del rngs
        self.weights = nnx.Param(jnp.zeros((runs, dims)))


def _squares(model: Descent, batch: dict[str, Array]) -> Array:
    """Half the mean squared error of every run, all runs added up."""
    errors_BR = (batch["x"] * model.weights[...][None]).sum(-1) - batch["y"]
    return 0.5 * jnp.square(errors_BR).mean(0).sum()


def _distances(model: Descent, batch: dict[str, Array]) -> Array:
    """Mean distance of a number to the rows, all runs added up."""
    return jnp.abs(model.weights[...][None, :, 0] - batch["y"]).mean(0).sum()


def problem(curvatures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of least squares whose Hessian has these eigenvalues, and noisy targets."""
    draws = np.random.default_rng(0)
    basis = np.linalg.qr(draws.normal(size=(_ROWS, _DIMS)))[0]
    turn = np.linalg.qr(draws.normal(size=(_DIMS, _DIMS)))[0]
    x = math.sqrt(_ROWS) * basis * np.sqrt(curvatures) @ turn
    y = x @ np.ones(_DIMS) + draws.normal(size=_ROWS)
    return x, y


def descend(
    loss: Any, rate: Any, batches: dict[str, np.ndarray], workers: int, dims: int
) -> np.ndarray:
    """Weights [steps, runs, dims] of SGD on `data=workers`, from zeros.

    Args:
      loss: of the model.
      rate: of SGD, or a schedule.
      batches: {name: [steps, rows, runs, ...]}.
      workers: devices that share the rows of a batch.
      dims: of the weights.
    """
    runs = batches["y"].shape[2]
    model = meshpar.from_nnx(functools.partial(Descent, runs, dims), loss)
    batches = {name: x.astype(np.float32) for name, x in batches.items()}
    program = meshpar.lower(
        model,
        optax.sgd(rate),
        f"data={workers}",
        {name: x[0] for name, x in batches.items()},
        devices=jax.devices()[:workers],
    )

    def step(state: Any, batch: Any) -> tuple[Any, Array]:
        state, _ = program.step(state, batch)
        return state, state.params["weights"]

    run = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))
    return np.asarray(run(program.init(0), batches)[1], np.float64)


def gradient_descent(rate: float, steps: int) -> float:
    """Factor of a step on the distance to the minimum, over the last half."""
    x, y = problem(_STIFF)
    best = np.linalg.lstsq(x, y)[0]
    whole = {"x": x[None, :, None], "y": y[None, :, None]}
    batches = {name: np.repeat(a, steps, 0) for name, a in whole.items()}
    found = descend(_squares, rate, batches, _DEVICES, _DIMS)[:, 0]
    distances = np.linalg.norm(found - best, axis=1)
    half = steps // 2
    return float((distances[-1] / distances[half]) ** (1 / (steps - 1 - half)))


def _drawn(
    curvatures: np.ndarray, steps: int, rows: int, runs: int, seed: int
) -> dict[str, np.ndarray]:
    """Batches of rows that are drawn anew for every run."""
    x, y = problem(curvatures)
    draws = np.random.default_rng(seed)
    chosen = draws.integers(0, _ROWS, (steps, rows, runs))
    return {"x": x[chosen], "y": y[chosen]}


def gaps(weights: np.ndarray, curvatures: np.ndarray) -> np.ndarray:
    """Mean gap [steps] of the objective to its minimum, over all runs."""
    x, y = problem(curvatures)
    away = weights - np.linalg.lstsq(x, y)[0]
    return 0.5 * np.einsum("tri,ij,trj->tr", away, x.T @ x / _ROWS, away).mean(1)


def falling_rate(steps: int, runs: int, seed: int) -> np.ndarray:
    """Gaps [steps] of SGD with the rate 1 / (mu (t + t0)), one row for each worker."""
    x, _ = problem(_MILD)
    mu = float(np.linalg.eigvalsh(x.T @ x / _ROWS)[0])
    start = 2 * float(np.square(x).sum(1).max()) / mu
    batches = _drawn(_MILD, steps, _DEVICES, runs, seed)
    rate = lambda t: 1 / (mu * (t + start / _DEVICES))  # noqa: E731
    return gaps(descend(_squares, rate, batches, _DEVICES, _DIMS), _MILD)


def floor(workers: int, rate: float, steps: int, runs: int, seed: int) -> float:
    """Gap at which SGD with a fixed rate stays, one row for each worker."""
    batches = _drawn(_MILD, steps, workers, runs, seed)
    found = descend(_squares, rate, batches, workers, _DIMS)
    return float(gaps(found, _MILD)[steps // 4 :].mean())


def exact_floor(workers: int, rate: float) -> float:
    """This gap in closed form: that of the covariance which a step leaves as it is.

    With A = x x^T of a row, H its mean and e the row's error at the minimum:
    C = E[(I - r A) C (I - r A)] + r^2 E[e^2 A], of means over the workers' rows.
    """
    x, y = problem(_MILD)
    outer = x[:, :, None] * x[:, None, :]
    hessian, size = outer.mean(0), _DIMS**2
    one = np.eye(_DIMS)
    squares = np.einsum("nij,nkl->ikjl", outer, outer).reshape(size, size) / _ROWS
    pairs = squares / workers + (1 - 1 / workers) * np.kron(hessian, hessian)
    kept = np.eye(size) - rate * (np.kron(hessian, one) + np.kron(one, hessian))
    errors = y - x @ np.linalg.lstsq(x, y)[0]
    noise = (errors[:, None, None] ** 2 * outer).mean(0).ravel() / workers
    covariance = np.linalg.solve(np.eye(size) - kept - rate**2 * pairs, rate**2 * noise)
    return float(0.5 * np.trace(hessian @ covariance.reshape(_DIMS, _DIMS)))


def hard_gap(steps: int, runs: int, seed: int) -> float:
    """Gap of the mean of all iterates on a convex problem that the rows barely tell.

    f(w) = E|w - s| with s = 1 a little more often than -1, by the inverse root of the
    number of rows that all workers see in T steps. Noise and drift then both take w as
    far as the minimum: the problem of the lower bound (Agarwal et al.,
    arXiv:1009.0571). The rate is the root of the workers over that of T.
    """
    share = 0.5 + 0.5 / math.sqrt(_DEVICES * steps)
    draws = np.random.default_rng([seed, steps])
    drawn = draws.random((steps, _DEVICES, runs)) < share
    batches = {"y": np.where(drawn, 1.0, -1.0)}
    rate = math.sqrt(_DEVICES / steps)
    found = descend(_distances, rate, batches, _DEVICES, 1)
    mean = np.concatenate([np.zeros((1, runs, 1)), found])[:-1].mean(0)[:, 0]
    value = lambda w: share * abs(w - 1) + (1 - share) * abs(w + 1)  # noqa: E731
    return float((value(mean) - value(1.0)).mean())


def slope(xs: Any, ys: Any) -> float:
    """Slope of a line through logarithms."""
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])
