"""What a replica makes of averaged weights that arrive.

Each is called with the replica's weights now, those of its snapshot, and what arrived.
"""

import dataclasses

from meshpar.arrays import Array
from meshpar.errors import StalenessError


@dataclasses.dataclass(frozen=True)
class Overwrite:
    """Takes the global weights; what was learned during the delay is lost."""

    def __call__(self, now: Array, snapshot: Array, arrived: Array) -> Array:
        """What a replica goes on with."""
        del now, snapshot
        return arrived


@dataclasses.dataclass(frozen=True)
class Shift:
    """Takes the global weights and adds what was learned during the delay."""

    def __call__(self, now: Array, snapshot: Array, arrived: Array) -> Array:
        """What a replica goes on with."""
        return arrived + (now - snapshot)


@dataclasses.dataclass(frozen=True)
class Lerp:
    """Between the replica's own weights and the global ones.

    Attributes:
      own: weight of the replica's own, 0 to below 1.

    Source: Streaming DiLoCo, arXiv:2501.18512, section 2.3 (alpha).
    """

    own: float = 0.5

    def __post_init__(self):
        if not 0 <= self.own < 1:
            raise StalenessError(
                f"Lerp({self.own}): the weight of a replica's own is 0 to below 1"
            )

    def __call__(self, now: Array, snapshot: Array, arrived: Array) -> Array:
        """What a replica goes on with."""
        del snapshot
        return self.own * now + (1 - self.own) * arrived


@dataclasses.dataclass(frozen=True)
class Elastic:
    """Pulls replicas and a center towards each other: x -= alpha (x - center).

    The center moves by beta = replicas * alpha times its distance to the average.

    Attributes:
      alpha: strength of the pull, above 0; replicas * alpha may be at most 1.

    Source: EASGD, arXiv:1412.6651, equations 5 and 6.
    """

    alpha: float

    def __post_init__(self):
        if not self.alpha > 0:
            raise StalenessError(f"Elastic({self.alpha}): use a pull above 0")

    def __call__(self, now: Array, snapshot: Array, arrived: Array) -> Array:
        """What a replica goes on with; `arrived` is the center before it moved."""
        return now - self.alpha * (snapshot - arrived)


Merge = Overwrite | Shift | Lerp | Elastic
