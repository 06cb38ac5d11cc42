"""Reads of whole versions of the weights, while islands train.

A group that only infers reads all ranges of the store at one version, so that it never
sees half of a round.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from meshpar.islands.weights_vector import WeightsVector


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads versions of the weights of running islands, from any thread.

    In Ray it can be pickled, so that actors and tasks of the same cluster may read.

    Attributes:
      vector: the trained weights.
      read: (version, or None for the newest) -> (version, weights [N]).
    """

    vector: WeightsVector
    read: Callable[[int | None], tuple[int, np.ndarray]]

    def pull_version(
        self, version: int | None = None
    ) -> tuple[int, dict[str, np.ndarray]]:
        """Reads all trained weights at one version, as `Store.pull_version` does.

        The first weights are version 1. In rounds (BSP, or a quorum) every round makes
        the next version; otherwise versions count the pushes to each range.

        Args:
          version: by default the newest that all ranges have reached.

        Returns:
          (version, {path: array on the host}).

        Raises:
          MeshparError: a version that a range has not reached, or does not keep.
        """
        version, weights_N = self.read(version)
        return version, self.vector.cut(weights_N)
