"""Managed communication: pushes within a budget of bytes, important updates first.

Updates add up at the worker until they are sent. A push takes as many numbers as its
budget allows, in an order by importance; the rest waits for the next one.

Source: Wei et al., Managed Communication and Consistency for Fast Data-Parallel
  Iterative Analytics (Bosen), SoCC 2015.
"""

from collections.abc import Mapping

import numpy as np

from meshpar.errors import MeshparError

ORDERS = ("magnitude", "relative", "random", "round_robin")
"""Orders by name: the largest updates first, or the largest over the values that they
change; and two that look at no update, to compare with."""

KEY_BYTES = 8
"""Bytes of one number of a sparse push, with its key."""

_SMALLEST = 1e-3
"""Values below it count as this, where updates are compared with them."""


class ManagedPushes:
    """Updates of one worker that wait, and those that a push may take.

    Args:
      size: N, numbers of an update.
      budget: bytes of a push, for keys and numbers.
      order: a name in `ORDERS`.
      seed: of the order "random", and of the number with which "round_robin" begins.

    Attributes:
      unsent_N: sums of the updates that wait.
      turn: pushes so far.

    Raises:
      MeshparError: a budget below one number, or an unknown order.
    """

    def __init__(self, size: int, budget: int, order: str = "magnitude", seed: int = 0):
        if budget < KEY_BYTES:
            raise MeshparError(
                f"budget={budget}: a number and its key take {KEY_BYTES} bytes; use as "
                "many at least"
            )
        if order not in ORDERS:
            raise MeshparError(f"order={order!r}: use one of {ORDERS}")
        self._budget, self._order, self._seed = budget, order, seed
        self.unsent_N, self.turn = np.zeros(size, np.float32), 0

    def take(
        self, update_N: np.ndarray, values_N: np.ndarray
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """Adds an update, and takes out what the next push sends.

        Args:
          update_N: the update.
          values_N: the newest values that the worker has read.

        Returns:
          (sorted keys, their numbers); (None, numbers [N]) where the budget is enough
          for all of them.
        """
        self.unsent_N += update_N
        self.turn += 1
        if self._budget >= self.unsent_N.nbytes:
            sent, self.unsent_N = self.unsent_N, np.zeros_like(self.unsent_N)
            return None, sent
        keys = np.sort(self._chosen(values_N, self._budget // KEY_BYTES))
        sent = self.unsent_N[keys]
        self.unsent_N[keys] = 0
        return keys.astype(np.int32), sent

    def _chosen(self, values_N: np.ndarray, count: int) -> np.ndarray:
        """At most `count` keys that have an update."""
        waiting = np.flatnonzero(self.unsent_N)
        if len(waiting) <= count:
            return waiting
        if self._order == "random":
            draws = np.random.default_rng([self._seed, self.turn])
            return draws.choice(waiting, count, replace=False)
        if self._order == "round_robin":
            size = len(self.unsent_N)
            first = int(np.random.default_rng(self._seed).integers(size))
            start = (first + (self.turn - 1) * count) % size
            first = np.searchsorted(waiting, start)
            return np.roll(waiting, -first)[:count]
        importance = np.abs(self.unsent_N[waiting])
        if self._order == "relative":
            importance /= np.maximum(np.abs(values_N[waiting]), _SMALLEST)
        return waiting[np.argpartition(-importance, count)[:count]]

    def snapshot(self) -> dict[str, np.ndarray]:
        """The updates that wait, and the number of pushes."""
        return {"unsent_N": self.unsent_N.copy(), "turn": np.int64(self.turn)}

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        """Takes the state of a snapshot."""
        self.unsent_N = np.array(snapshot["unsent_N"], np.float32)
        self.turn = int(snapshot["turn"])
