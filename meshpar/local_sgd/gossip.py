"""Gossip: replicas average with their neighbours in a graph instead of all replicas.

A graph is a sequence of rounds, used in turn. A round is a doubly stochastic matrix W:
the new weights of replica i are the sum over j of W[i, j] x_j. Each distance between
neighbours is one collective permute, so only neighbours communicate.

Source: Lian et al., D-PSGD, arXiv:1705.09056; Assran et al., stochastic gradient push,
  arXiv:1811.10792, and Ying et al., arXiv:2110.13363 (exponential graphs).
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.arrays import Array
from meshpar.collectives.compression import Compression
from meshpar.errors import MeshparError

Matrix = tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True)
class Gossip:
    """The graph along which replicas average.

    Attributes:
      graph: "ring" (both neighbours, 1/3 each), "exponential" (one neighbour at
        distance 1, 2, 4, ... in turn, which averages exactly after log2 R rounds), or
        matrices [R, R], one per round.

    Raises:
      MeshparError: an unknown name, or no matrix.
    """

    graph: str | Sequence = "ring"

    def __post_init__(self):
        if isinstance(self.graph, str):
            if self.graph not in _GRAPHS:
                raise MeshparError(
                    f"gossip graph {self.graph!r}: use {' or '.join(_GRAPHS)}, or one "
                    "matrix [R, R] per round"
                )
            return
        try:
            rounds = tuple(
                tuple(tuple(map(float, row)) for row in np.atleast_2d(matrix))
                for matrix in self.graph
            )
        except (TypeError, ValueError) as error:
            raise MeshparError(
                f"gossip graph {self.graph!r}: {error}; give one matrix [R, R] of "
                "numbers per round"
            ) from error
        if not rounds:
            raise MeshparError("gossip graph: give at least one matrix [R, R]")
        object.__setattr__(self, "graph", rounds)

    def rounds(self, replicas: int) -> list[np.ndarray]:
        """The mixing matrices [R, R] of all rounds.

        Args:
          replicas: R.

        Raises:
          MeshparError: a matrix has another size, or does not preserve the average.
        """
        if isinstance(self.graph, str):
            return _GRAPHS[self.graph](replicas)
        matrices = [np.array(matrix) for matrix in self.graph]
        for number, matrix in enumerate(matrices):
            if matrix.shape != (replicas, replicas):
                raise MeshparError(
                    f"gossip round {number}: the matrix is {list(matrix.shape)}; "
                    f"replica={replicas} needs {[replicas, replicas]}"
                )
            sums = np.concatenate([matrix.sum(0), matrix.sum(1)])
            if not (matrix >= 0).all() or not np.abs(sums - 1).max() <= 1e-6:
                raise MeshparError(
                    f"gossip round {number}: rows and columns have to sum to 1, without"
                    f" negative weights, but sum to {np.round(sums, 4).tolist()}"
                )
        return matrices


def _ring(replicas: int) -> list[np.ndarray]:
    own = np.eye(replicas)
    left, right = np.roll(own, 1, axis=1), np.roll(own, -1, axis=1)
    if replicas == 2:
        return [(own + left) / 2]
    return [(own + left + right) / 3]


def _exponential(replicas: int) -> list[np.ndarray]:
    if replicas & (replicas - 1):
        raise MeshparError(
            f"gossip graph 'exponential' needs a power of 2, not replica={replicas}; "
            "use 'ring'"
        )
    own = np.eye(replicas)
    distances = [1 << r for r in range(replicas.bit_length() - 1)]
    return [(own + np.roll(own, -distance, axis=1)) / 2 for distance in distances]


_GRAPHS: dict[str, Callable[[int], list[np.ndarray]]] = {
    "ring": _ring,
    "exponential": _exponential,
}


def neighbour_distances(matrix: np.ndarray) -> list[int]:
    """Distances to the neighbours of a round [R, R]; each is one permute."""
    replicas = len(matrix)
    rows = np.arange(replicas)
    return [d for d in range(1, replicas) if matrix[rows, (rows + d) % replicas].any()]


def mix_with_neighbours(
    x: Array, matrix: np.ndarray, axis: str, compression: Compression
) -> Array:
    """One round of gossip: this replica's share of x plus its neighbours' shares.

    Communication: one encoded x sent per neighbour. Call inside shard_map.

    Args:
      x: this replica's array [n], float32.
      matrix: [R, R], doubly stochastic.
      axis: mesh axis of the replicas.
      compression: format of what neighbours send.

    Returns:
      The weighted sum [n], float32.
    """
    replicas, number = len(matrix), lax.axis_index(axis)
    rows, sent = np.arange(replicas), compression.encode(x)
    total = jnp.asarray(matrix.diagonal(), x.dtype)[number] * x
    for distance in neighbour_distances(matrix):
        weights = matrix[rows, (rows + distance) % replicas]
        pairs = [((i + distance) % replicas, i) for i in rows if weights[i]]
        received = lax.ppermute(sent, axis, pairs)
        decoded = compression.decode(received, len(x))
        total += jnp.asarray(weights, x.dtype)[number] * decoded
    return total
