"""Gradient coding: the exact sum of gradients, whichever s workers do not answer.

The data is cut into n parts for n workers. Worker i computes the gradients of s + 1
parts and sends one combination of them, row i of a matrix B. From any n - s of these
vectors the sum of all n gradients follows, as a linear combination.

Source: Tandon, Lei, Dimakis, Karampatziakis, Gradient Coding, ICML 2017,
  arXiv:1612.03301, algorithms 1 and 2 and section 4.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from meshpar.errors import MeshparError

_TOLERANCE = 1e-8
"""Largest error of a decoded coefficient, which should be 1."""


class StragglersError(MeshparError):
    """The workers that answered do not determine the sum of the gradients."""


@dataclasses.dataclass(frozen=True, eq=False)
class Code:
    """A gradient code.

    Attributes:
      matrix: [workers, parts]; a worker computes the parts with an entry in its row.
      tolerates: number of workers that may be missing, whichever they are.
    """

    matrix: np.ndarray
    tolerates: int

    def parts(self, worker: int) -> np.ndarray:
        """The parts of which a worker computes the gradients."""
        return np.flatnonzero(self.matrix[worker])

    def encode(self, worker: int, gradients: Sequence[np.ndarray]) -> np.ndarray:
        """The message of a worker.

        Args:
          worker: its number.
          gradients: those of `parts(worker)`, in this order; arrays of one shape.
        """
        weights = self.matrix[worker, self.parts(worker)]
        return np.tensordot(weights, np.asarray(gradients), axes=1)

    def decode(self, workers: Sequence[int]) -> np.ndarray:
        """Coefficients with which the answers add up to the sum of all gradients.

        Args:
          workers: those that answered.

        Returns:
          float64 [answers], in the order of `workers`.

        Raises:
          StragglersError: too few workers answered.
        """
        answers = self.matrix[list(workers)]
        ones = np.ones(self.matrix.shape[1])
        found = np.linalg.lstsq(answers.T, ones, rcond=None)[0]
        if len(workers) == 0 or np.abs(found @ answers - ones).max() > _TOLERANCE:
            missing = sorted(set(range(len(self.matrix))) - set(workers))
            raise StragglersError(
                f"workers {missing} are missing, and the code tolerates any "
                f"{self.tolerates}: wait for more of them, or use a code that "
                "tolerates more"
            )
        return found


def _check(num_workers: int, tolerates: int) -> None:
    if not 0 <= tolerates < num_workers:
        raise MeshparError(
            f"tolerates={tolerates} of {num_workers} workers: use a number from 0 to "
            f"{num_workers - 1}"
        )


def fractional_repetition(num_workers: int, tolerates: int) -> Code:
    """Groups of s + 1 workers that all compute the same s + 1 parts.

    It also stands more than s missing workers, unless they are a whole group.

    Args:
      num_workers: n, a multiple of s + 1.
      tolerates: s.

    Raises:
      MeshparError: numbers for which there is no such code.
    """
    _check(num_workers, tolerates)
    size = tolerates + 1
    if num_workers % size:
        raise MeshparError(
            f"tolerates={tolerates} with {num_workers} workers: use a number of "
            f"workers that {size} divides, or the cyclic code"
        )
    groups = np.arange(num_workers) // size
    return Code((groups[:, None] == groups[None]).astype(float), tolerates)


def cyclic(num_workers: int, tolerates: int, seed: int = 0) -> Code:
    """Worker i computes the parts i, i + 1, ..., i + s around a circle.

    Args:
      num_workers: n, any number.
      tolerates: s.
      seed: of the random matrix that the code is made from.

    Raises:
      MeshparError: s is not below n.
    """
    _check(num_workers, tolerates)
    matrix = np.eye(num_workers)
    if tolerates:
        rng = np.random.default_rng(seed)
        checks = rng.normal(size=(tolerates, num_workers))
        checks[:, -1] = -checks[:, :-1].sum(axis=1)  # So the row of ones is a code.
        for worker in range(num_workers):
            first, *others = (worker + np.arange(tolerates + 1)) % num_workers
            matrix[worker, others] = -np.linalg.solve(
                checks[:, others], checks[:, first]
            )
    return Code(matrix, tolerates)
