"""Merges: how a replica combines its weights with the global weights that arrive.

Each merge is called with the replica's weights now, its weights at the snapshot, and
the weights that arrived, all of the same shape, and returns the replica's new weights.
"""

import dataclasses

from meshpar.arrays import Array
from meshpar.errors import StalenessError


@dataclasses.dataclass(frozen=True)
class Overwrite:
    """Takes the global weights; updates made during the delay are lost."""

    def __call__(self, now: Array, snapshot: Array, arrived: Array) -> Array:
        """Returns the replica's new weights."""
        del now, snapshot
        return arrived


@dataclasses.dataclass(frozen=True)
class Shift:
    """Takes the global weights and adds the updates made during the delay."""

    def __call__(self, now: Array, snapshot: Array, arrived: Array) -> Array:
        """Returns the replica's new weights."""
        return arrived + (now - snapshot)


@dataclasses.dataclass(frozen=True)
class Lerp:
    """Interpolates between the replica's own weights and the global weights.

    Attributes:
      own: share of the replica's own weights, 0 to below 1.

    Raises:
      StalenessError: `own` is out of range.

    Source: Streaming DiLoCo, arXiv:2501.18512, section 2.3 (alpha).
    """

    own: float = 0.5

    def __post_init__(self):
        if not isinstance(self.own, int | float) or not 0 <= self.own < 1:
            raise StalenessError(
                f"Lerp({self.own!r}): the share of a replica's own weights is 0 to "
                "below 1; use 0.5"
            )

    def __call__(self, now: Array, snapshot: Array, arrived: Array) -> Array:
        """Returns the replica's new weights."""
        del snapshot
        return self.own * now + (1 - self.own) * arrived


@dataclasses.dataclass(frozen=True)
class Elastic:
    """Pulls replicas and a center towards each other: x -= alpha (x - center).

    The center moves by beta = replicas * alpha times its distance to the average.

    Attributes:
      alpha: strength of the pull, above 0; replicas * alpha may be at most 1.

    Raises:
      StalenessError: `alpha` is out of range.

    Source: EASGD, arXiv:1412.6651, equations 5 and 6.
    """

    alpha: float

    def __post_init__(self):
        if not isinstance(self.alpha, int | float) or not 0 < self.alpha <= 1:
            raise StalenessError(f"Elastic({self.alpha!r}): use a pull above 0 to 1")

    def __call__(self, now: Array, snapshot: Array, arrived: Array) -> Array:
        """Returns the replica's new weights; `arrived` is the old center."""
        return now - self.alpha * (snapshot - arrived)


Merge = Overwrite | Shift | Lerp | Elastic
