"""The rules of a store: consistency, server-side update, rounds and decoders."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from meshpar.errors import MeshparError
from meshpar.islands.consistency import Consistency
from meshpar.islands.key_range import Contribution

UpdateFunction = Callable[[np.ndarray, dict[str, np.ndarray], Contribution], None]
"""(values, state, contribution): changes values and state in place, deterministically.

The state is empty before the first call, and is replicated and saved.
"""

Decoder = Callable[
    [Any, int, dict[str, np.ndarray]], tuple[np.ndarray | None, np.ndarray]
]
"""(data, size of the range, cache) -> (sorted keys or None, values).

The cache belongs to the range, is replicated and saved. A decoder raises `RefusedError`
for data that it cannot take, such as a hash of keys that it has not seen. Any other
error of a decoder is refused as well.
"""


class RefusedError(Exception):
    """An operation that a range does not take; the text goes to the client."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules that decide how a range behaves; all servers have the same.

    Attributes:
      consistency: when pulls are answered.
      update: the server-side update, or {range: update}.
      quorum: workers that a round needs; None for all where updates are averaged in
        rounds at all (`Consistency.in_rounds`).
      grace: seconds that a round waits for others once it has its quorum. The host
        measures them; with 0 the round closes at once.
      decoders: {encoding: decoder}.
      history: older versions of its values that a range keeps for readers.
      aggregate: whether the replicas of a range get the average of a round, in place of
        its pushes.

    Raises:
      MeshparError: `aggregate` without rounds.
    """

    consistency: Consistency
    update: UpdateFunction | Mapping[str, UpdateFunction]
    quorum: int | None = None
    grace: float = 0.0
    decoders: Mapping[str, Decoder] = dataclasses.field(default_factory=dict)
    history: int = 0
    aggregate: bool = False

    def __post_init__(self):
        if self.aggregate and not self.in_rounds:
            raise MeshparError(
                f"aggregate=True with {self.consistency}: replicas get averages of "
                "rounds, and it makes none; use BSP() or a quorum"
            )

    @property
    def in_rounds(self) -> bool:
        """Whether updates are applied as averages of rounds."""
        return self.quorum is not None or self.consistency.in_rounds

    def update_of(self, name: str) -> UpdateFunction:
        """The server-side update of a range."""
        return self.update if callable(self.update) else self.update[name]
