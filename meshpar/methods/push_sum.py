"""Push-sum and asynchronous gossip: averages over graphs that are not regular.

In push-sum every replica sends equal shares of its numbers, and of a weight that starts
at 1, along its outgoing edges. The numbers over the weight tend to the mean, also on
directed graphs, where averages with neighbours tend to something else. In asynchronous
gossip one pair of neighbours at a time takes its mean.

    sends = push_sum.random_graph(8, degree=2, directed=True)
    x, weight = push_sum.mix(x, weight, push_sum.out_shares(sends), "replica")
    mean = x / weight

`metropolis` and `pairs` give matrices for `meshpar.local_sgd.Gossip`, which trains with
them. A graph is a matrix [R, R] of booleans: whether replica i sends to replica j.

Source: Kempe, Dobra, Gehrke, FOCS 2003 (push-sum); Assran et al., arXiv:1811.10792
  (stochastic gradient push); Boyd et al., Randomized gossip algorithms, IEEE
  Transactions on Information Theory 2006; Xiao, Boyd, 2004 (Metropolis weights).
"""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from meshpar.arrays import Array
from meshpar.collectives.compression import make_compression
from meshpar.errors import MeshparError
from meshpar.local_sgd.gossip import mix_with_neighbours


def ring(replicas: int, directed: bool = False) -> np.ndarray:
    """Each replica sends to the next one, and without a direction to the last as well.

    Raises:
      MeshparError: fewer than two replicas.
    """
    return _distances(replicas, [1] if directed else [1, replicas - 1])


def exponential(replicas: int) -> np.ndarray:
    """Each replica sends to those at distances 1, 2, 4 and so on.

    Raises:
      MeshparError: fewer than two replicas.
    """
    powers = range((replicas - 1).bit_length())
    return _distances(replicas, [1 << power for power in powers])


def _distances(replicas: int, distances: list[int]) -> np.ndarray:
    if replicas < 2:
        raise MeshparError(f"a graph of {replicas} replicas: use at least two")
    sends = np.zeros((replicas, replicas), bool)
    rows = np.arange(replicas)
    for distance in distances:
        sends[rows, (rows + distance) % replicas] = True
    return sends


def random_graph(
    replicas: int, degree: int, directed: bool = False, seed: int = 0
) -> np.ndarray:
    """A ring with edges more: each replica sends to others that are drawn.

    The ring keeps the graph connected. Degrees differ: of a directed graph the number
    of senders, and without a direction also that of receivers.

    Args:
      replicas: R.
      degree: replicas to which each one sends, the next on the ring among them.
      directed: whether edges have one direction.
      seed: of the draws.

    Raises:
      MeshparError: a degree that no replica can have.
    """
    if not 1 <= degree < replicas:
        raise MeshparError(f"degree={degree} of {replicas} replicas: use 1 to R - 1")
    draws, sends = np.random.default_rng(seed), ring(replicas, directed=True)
    for replica in range(replicas):
        free = np.flatnonzero(~sends[replica] & (np.arange(replicas) != replica))
        sends[replica, draws.choice(free, degree - 1, replace=False)] = True
    return sends if directed else sends | sends.T


def _checked(sends: np.ndarray) -> np.ndarray:
    """The graph without edges from a replica to itself.

    Raises:
      MeshparError: a replica that sends to nobody, or another shape.
    """
    sends = np.array(sends, bool)
    if sends.ndim != 2 or sends.shape[0] != sends.shape[1]:
        raise MeshparError(f"a graph of shape {sends.shape}: give [R, R]")
    np.fill_diagonal(sends, False)
    if not sends.any(1).all():
        alone = np.flatnonzero(~sends.any(1)).tolist()
        raise MeshparError(f"replicas {alone} send to nobody: give each an edge")
    return sends


def out_shares(sends: np.ndarray) -> np.ndarray:
    """The matrix [R, R] of push-sum: replica i keeps and sends equal shares.

    Columns sum to 1, so that the total stays; rows need not.

    Raises:
      MeshparError: a replica that sends to nobody.
    """
    to_and_self = _checked(sends) | np.eye(len(sends), dtype=bool)
    return to_and_self.T / to_and_self.sum(1)


def metropolis(sends: np.ndarray) -> np.ndarray:
    """A symmetric matrix [R, R] for gossip on a graph without a direction.

    An edge weighs 1 / (1 + the larger degree of its ends), and a replica keeps the
    rest, so that rows and columns sum to 1.

    Raises:
      MeshparError: a directed graph, or a replica without an edge.
    """
    sends = _checked(sends)
    if (sends != sends.T).any():
        raise MeshparError("a directed graph has no symmetric weights: use out_shares")
    degrees = sends.sum(1)
    matrix = sends / (1 + np.maximum(degrees[:, None], degrees))
    return matrix + np.diag(1 - matrix.sum(1))


def pairs(sends: np.ndarray, seed: int = 0) -> Iterator[np.ndarray]:
    """Matrices of asynchronous gossip without end: in each, one pair takes its mean.

    A replica that is drawn wakes up and calls a neighbour that is drawn.

    Args:
      sends: the graph.
      seed: of the draws.

    Raises:
      MeshparError: a replica that sends to nobody.
    """
    sends, draws = _checked(sends), np.random.default_rng(seed)
    return _pairs(sends, draws)


def _pairs(sends: np.ndarray, draws: np.random.Generator) -> Iterator[np.ndarray]:
    while True:
        one = int(draws.integers(len(sends)))
        pair = np.array([one, int(draws.choice(np.flatnonzero(sends[one])))])
        matrix = np.eye(len(sends))
        matrix[np.ix_(pair, pair)] = 0.5
        yield matrix


def mix(x: Array, weight: Array, matrix: np.ndarray, axis: str) -> tuple[Array, Array]:
    """One round of push-sum; call it inside shard_map.

    Communication: numbers and weight to every neighbour, in one permute for each
    distance on the mesh axis.

    Args:
      x: this replica's numbers [n], float32.
      weight: its weight, a scalar that starts at 1.
      matrix: [R, R] from `out_shares`.
      axis: mesh axis of the replicas.

    Returns:
      (numbers, weight) after the round; their quotient estimates the mean.

    Raises:
      MeshparError: columns of the matrix that do not sum to 1.
    """
    sums = np.asarray(matrix).sum(0)
    if not np.abs(sums - 1).max() <= 1e-6:
        raise MeshparError(
            f"push-sum: columns sum to {np.round(sums, 4).tolist()}, and to keep the "
            "total each has to sum to 1; use out_shares"
        )
    both = jnp.concatenate([x, jnp.reshape(weight, 1).astype(x.dtype)])
    both = mix_with_neighbours(both, matrix, axis, make_compression("f32"))
    return both[:-1], both[-1]
