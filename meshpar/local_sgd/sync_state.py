"""The state that one device keeps to synchronize replicas.

Array suffixes as in `fragments`: F fragments, S slices, K numbers of a slice, P numbers
of a piece.
"""

from typing import Any, NamedTuple


class SyncState(NamedTuple):
    """The state of one device between synchronizations; unused fields are ().

    Attributes:
      anchor: the global weights, float32: this replica's pieces [F, S, P], or whole
        [F, S, K] if lossy compression sends differences to them.
      outer: state of the outer optimizer of every piece, [F, S, ...].
      snapshot: [S, K] weights of the traveling fragment when its snapshot was taken.
      arrived: [S, K] the global weights that arrived for it.
      piece: [P] result of the last outer step, gathered in the next step.
      residual_up: [F, S, K] compression error of this replica's differences.
      residual_down: [F, S, P] compression error of the updates that it hands out.
    """

    anchor: Any
    outer: Any
    snapshot: Any
    arrived: Any
    piece: Any
    residual_up: Any
    residual_down: Any


REASONS = {
    "anchor": "global weights: 1/R, or whole where lossy compression sends differences",
    "outer": "outer optimizer: 1/R",
    "snapshot": "the traveling fragment at its snapshot",
    "arrived": "the global weights that arrived for it",
    "piece": "result of the last outer step, gathered in the next step",
    "residual_up": "compression error of this replica's differences",
    "residual_down": "compression error of the updates it hands out: 1/R",
}
"""The purpose of each field of a `SyncState`."""
