"""Batch training of logistic regression: Sandblaster L-BFGS and coded gradients."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import scipy.optimize
import scipy.sparse as sp

from meshpar.methods.gradient_coding import codes
from meshpar.methods.sandblaster import lbfgs
from meshpar.methods.sandblaster.portions import Portions, schedule


class Problem:
    """Logistic regression with a quadratic penalty, over all rows at once.

    Args:
      rows: float [rows, features].
      labels: 1 or -1, [rows].
      l2: weight of half the squared norm of the weights, beside the sum of the losses.
    """

    def __init__(self, rows: sp.csr_array, labels: np.ndarray, l2: float):
        self.rows, self.l2 = rows.astype(np.float64), l2
        self.labels = labels.astype(np.float64)
        self.num_rows, self.num_features = rows.shape

    def cut(self, parts: int) -> list["Problem"]:
        """The problem of each part of the rows; the penalty is left to the caller."""
        cuts = [self.num_rows * i // parts for i in range(parts + 1)]
        return [
            Problem(self.rows[a:b], self.labels[a:b], 0.0)
            for a, b in zip(cuts, cuts[1:], strict=False)
        ]

    def value_and_gradient(self, weights: np.ndarray) -> tuple[float, np.ndarray]:
        """The objective and its gradient, float64 [features]."""
        margins = self.labels * (self.rows @ weights)
        slopes = -self.labels / (1 + np.exp(np.clip(margins, -500, 500)))
        value, gradient = np.logaddexp(0, -margins).sum(), self.rows.T @ slopes
        if self.l2:  # A part has none, and should not pay for long vectors.
            value += self.l2 / 2 * (weights @ weights)
            gradient += self.l2 * weights
        return float(value), gradient

    def smoothness(self) -> float:
        """A bound of the largest curvature of the objective, by power iterations."""
        vector = np.ones(self.num_features)
        for _ in range(30):
            vector /= np.linalg.norm(vector)
            vector = self.rows.T @ (self.rows @ vector)
        return 1.05 * float(np.linalg.norm(vector)) / 4 + self.l2


@dataclasses.dataclass(frozen=True)
class Workers:
    """The workers of a batch, and how it is cut for them.

    Attributes:
      speeds: of each worker; 1 is a row of its share per unit of time.
      portions: per worker.
      backup: whether free workers start copies of the last portions.
    """

    speeds: Sequence[float]
    portions: int
    backup: bool

    def run(self, num_portions: int | None = None) -> Portions:
        """Simulates one batch; its time is about 1 if all speeds are 1.

        Args:
          num_portions: of the batch, if it has too few rows for `portions`.
        """
        count = num_portions or len(self.speeds) * self.portions
        work = [len(self.speeds) / count] * count
        return schedule(work, self.speeds, self.backup)


class Sandblaster:
    """L-BFGS whose batches are portions, on servers that hold ranges of all vectors.

    Args:
      problem: to solve.
      workers: that compute the portions.
      num_servers: servers.
      memory: pairs of differences that L-BFGS keeps.

    Attributes:
      seconds: simulated time of all batches so far.
    """

    def __init__(
        self, problem: Problem, workers: Workers, num_servers: int, memory: int
    ):
        self._problem, self._workers, self.seconds = problem, workers, 0.0
        count = min(len(workers.speeds) * workers.portions, problem.num_rows)
        self._portions = problem.cut(count)
        size = problem.num_features
        cuts = [size * i // num_servers for i in range(num_servers + 1)]
        self._ranges = [
            lbfgs.VectorRange(a, b) for a, b in zip(cuts, cuts[1:], strict=False)
        ]
        self.coordinator = lbfgs.Coordinator(self._ranges, self._evaluate, memory)

    def weights(self) -> np.ndarray:
        """The weights, float64 [features]."""
        return np.concatenate([part.vectors[lbfgs.WEIGHTS] for part in self._ranges])

    def _evaluate(self) -> float:
        """One batch: the value, and the gradient on the servers.

        The servers add portions in the order of their numbers, so the result does not
        depend on who was first.
        """
        weights, l2 = self.weights(), self._problem.l2
        self.seconds += self._workers.run(len(self._portions)).seconds
        value, gradient = l2 / 2 * float(weights @ weights), l2 * weights
        for portion in self._portions:
            one, slopes = portion.value_and_gradient(weights)
            value += one
            gradient += slopes
        for part in self._ranges:
            part.vectors[lbfgs.GRADIENT] = gradient[part.start : part.stop]
        return value


def scipy_values(problem: Problem, memory: int, iterations: int) -> list[float]:
    """The objective after each iteration of SciPy's L-BFGS-B."""
    values: list[float] = []
    scipy.optimize.minimize(
        problem.value_and_gradient,
        np.zeros(problem.num_features),
        jac=True,
        method="L-BFGS-B",
        callback=lambda intermediate_result: values.append(intermediate_result.fun),
        options=dict(maxcor=memory, maxiter=iterations, ftol=0.0, gtol=0.0),
    )
    return values


NAIVE, IGNORE, CYCLIC, REPETITION = "naive", "ignore", "cyclic", "repetition"


@dataclasses.dataclass(frozen=True)
class Descent:
    """The outcome of a gradient descent with stragglers.

    Attributes:
      method: "naive" waits for all workers, "ignore" leaves the last ones out,
        "cyclic" and "repetition" are gradient codes.
      work: parts that each worker computes.
      seconds: simulated time of all rounds.
      objective: at the end.
      weights: at the end, float64 [features].
    """

    method: str
    work: int
    seconds: float
    objective: float
    weights: np.ndarray = dataclasses.field(repr=False)


def descend(
    problem: Problem,
    method: str,
    num_workers: int,
    stragglers: int,
    slowdown: float,
    rounds: int,
    seed: int,
) -> Descent:
    """Accelerated gradient descent while some workers are slow in each round.

    Args:
      problem: to solve; its rows are cut into one part per worker.
      method: a name of `Descent.method`.
      num_workers: n.
      stragglers: s; in each round so many workers, drawn at random, are slow.
      slowdown: of a slow worker.
      rounds: steps.
      seed: of the stragglers and of the cyclic code.
    """
    make = {CYCLIC: codes.cyclic, REPETITION: codes.fractional_repetition}
    code = codes.cyclic(num_workers, 0)
    if method == CYCLIC:
        code = make[method](num_workers, stragglers, seed)
    elif method == REPETITION:
        code = make[method](num_workers, stragglers)
    waits_for = num_workers if method == NAIVE else num_workers - stragglers
    parts, rng = problem.cut(num_workers), np.random.default_rng(seed)
    rate, seconds = 1 / problem.smoothness(), 0.0
    weights = ahead = np.zeros(problem.num_features)
    for number in range(rounds):
        times = np.full(num_workers, float(len(code.parts(0))))
        times[rng.choice(num_workers, stragglers, replace=False)] *= slowdown
        quick = np.sort(np.argsort(times, kind="stable")[:waits_for]).tolist()
        seconds += float(times[quick].max())
        sent = [
            code.encode(
                worker,
                [parts[i].value_and_gradient(ahead)[1] for i in code.parts(worker)],
            )
            for worker in quick
        ]
        if method == IGNORE:
            shares = np.full(waits_for, num_workers / waits_for)
        else:
            shares = code.decode(quick)
        gradient = shares @ np.array(sent) + problem.l2 * ahead
        before, weights = weights, ahead - rate * gradient
        ahead = weights + number / (number + 3) * (weights - before)
    value = problem.value_and_gradient(weights)[0]
    return Descent(method, len(code.parts(0)), seconds, value, weights)


def straggler_costs(
    num_workers: int, portions: int, slowdown: float
) -> Iterator[tuple[str, float]]:
    """(schedule, time of a batch with one slow worker over that without)."""
    slow = [1.0] * (num_workers - 1) + [1 / slowdown]
    for name, count, backup in (
        ("one portion per worker", 1, False),
        (f"{portions} portions per worker", portions, False),
        (f"{portions} portions per worker, backups", portions, True),
    ):
        whole = Workers([1.0] * num_workers, count, backup).run().seconds
        yield name, Workers(slow, count, backup).run().seconds / whole
    yield "no schedule can be below", num_workers / sum(slow)
