"""Gossip: replicas average with neighbours of a graph instead of with all.

A graph is a sequence of rounds, taken in turn, and a round a doubly stochastic matrix
W: replica i goes on with the sum over j of W[i, j] x_j. Each offset that occurs is one
permutation, so only neighbours exchange anything.

Source: Lian et al., D-PSGD, arXiv:1705.09056; Assran et al., stochastic gradient push,
  arXiv:1811.10792, and Ying et al., arXiv:2110.13363 (exponential graphs).
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshpar.collectives.compression import Compression
from meshpar.errors import MeshparError

Matrix = tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True)
class Gossip:
    """A graph of neighbours.

    Attributes:
      graph: "ring" (both neighbours, 1/3 each), "exponential" (one neighbour at
        distance 1, 2, 4, ... in turn, which averages exactly after log2 R rounds), or
        matrices [R, R], one per round.
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
        rounds = tuple(
            tuple(tuple(map(float, row)) for row in np.atleast_2d(matrix))
            for matrix in self.graph
        )
        if not rounds:
            raise MeshparError("gossip graph: give at least one matrix [R, R]")
        object.__setattr__(self, "graph", rounds)

    def rounds(self, replicas: int) -> list[np.ndarray]:
        """The mixing matrices [R, R] of all rounds.

        Raises:
          MeshparError: a matrix of another size, or that does not keep the average.
        """
        if isinstance(self.graph, str):
            return _GRAPHS[self.graph](replicas)
        made = [np.array(matrix) for matrix in self.graph]
        for number, w in enumerate(made):
            if w.shape != (replicas, replicas):
                raise MeshparError(
                    f"gossip round {number}: a matrix {list(w.shape)} for replica="
                    f"{replicas}"
                )
            sums = np.concatenate([w.sum(0), w.sum(1)])
            if (w < 0).any() or np.abs(sums - 1).max() > 1e-6:
                raise MeshparError(
                    f"gossip round {number}: rows and columns have to sum to 1, without"
                    f" negative weights, but sum to {np.round(sums, 4).tolist()}"
                )
        return made


def _ring(replicas: int) -> list[np.ndarray]:
    eye = np.eye(replicas)
    left, right = np.roll(eye, 1, axis=1), np.roll(eye, -1, axis=1)
    if replicas == 2:
        return [(eye + left) / 2]
    return [(eye + left + right) / 3]


def _exponential(replicas: int) -> list[np.ndarray]:
    if replicas & (replicas - 1):
        raise MeshparError(
            f"gossip graph 'exponential' needs a power of 2, not replica={replicas}; "
            "use 'ring'"
        )
    eye = np.eye(replicas)
    rounds = range(replicas.bit_length() - 1)
    return [(eye + np.roll(eye, -(1 << r), axis=1)) / 2 for r in rounds]


_GRAPHS: dict[str, Callable[[int], list[np.ndarray]]] = {
    "ring": _ring,
    "exponential": _exponential,
}


def neighbour_offsets(matrix: np.ndarray) -> list[int]:
    """Distances to the neighbours of a round: each is one permutation."""
    replicas = len(matrix)
    own = np.arange(replicas)
    return [d for d in range(1, replicas) if matrix[own, (own + d) % replicas].any()]


def mix_with_neighbours(
    x: jax.Array, matrix: np.ndarray, axis: str, wire: Compression
) -> jax.Array:
    """One round inside shard_map: own weight times x, and what neighbours send.

    Args:
      x: this replica's array [n], float32.
      matrix: [R, R], doubly stochastic.
      axis: mesh axis of the replicas.
      wire: how it travels.
    """
    replicas, number = len(matrix), lax.axis_index(axis)
    own, sent = np.arange(replicas), wire.encode(x)
    total = jnp.asarray(matrix.diagonal(), x.dtype)[number] * x
    for distance in neighbour_offsets(matrix):
        weights = matrix[own, (own + distance) % replicas]
        pairs = [((i + distance) % replicas, i) for i in own if weights[i]]
        got = lax.ppermute(sent, axis, pairs)
        total += jnp.asarray(weights, x.dtype)[number] * wire.decode(got, len(x))
    return total
