"""KKT filter: weights at zero that will stay there are no longer pushed.

At a minimum with L1 penalty, a weight is zero only if its gradient lies in [-l1, l1]
(Karush, Kuhn, Tucker). A weight at zero whose gradient lies inside by more than a
threshold is *far*: workers leave it out until the next full pass.

The threshold follows the training: it is a multiple of the largest violation of these
conditions that a range saw in its last update. At first it is so large that no weight
is far; near the minimum it falls to zero. It is the rule by which liblinear shrinks.

Source: Li et al., NeurIPS 2014, section 3.3; Yuan, Ho, Lin, An Improved GLMNET for
  L1-regularized Logistic Regression, JMLR 2012, section 5.3.
"""

import numpy as np

from meshpar.methods.dbpg.packet import KEY_BYTES, VALUE_BYTES


def violations(weights: np.ndarray, gradients: np.ndarray, l1: float) -> np.ndarray:
    """The distance of each weight from the KKT conditions, [keys]."""
    at_zero = np.maximum(np.abs(gradients) - l1, 0)
    elsewhere = np.abs(gradients + l1 * np.sign(weights))
    return np.where(weights == 0, at_zero, elsewhere)


def is_far(
    weights: np.ndarray, gradients: np.ndarray, l1: float, threshold: float
) -> np.ndarray:
    """Whether each weight is at zero and its gradient inside by a threshold, [keys]."""
    return (weights == 0) & (np.abs(gradients) < l1 - threshold)


class KKTFilter:
    """The keys that workers leave out, as the servers said.

    A worker gets NaN for the weight of a key that is far, which costs no bytes.

    Args:
      columns: numbers that a worker pushes per key.

    Attributes:
      name: of the filter, in tables.
      saved: bytes of keys, pushed numbers and answers that it saved so far.
    """

    name = "KKT"

    def __init__(self, columns: int):
        self._bytes_per_key = KEY_BYTES + VALUE_BYTES * (columns + 1)
        self._far: dict[str, np.ndarray] = {}
        self.saved = 0

    def select(self, channel: str, num_keys: int, full: bool) -> np.ndarray:
        """Positions of the keys that a worker works on and pushes.

        Args:
          channel: names worker and range.
          num_keys: keys of the worker in this range.
          full: whether this is a full pass.
        """
        if channel not in self._far:
            self._far[channel] = np.zeros(num_keys, bool)
        if full:
            return np.arange(num_keys)
        chosen = np.flatnonzero(~self._far[channel])
        self.saved += self._bytes_per_key * (num_keys - len(chosen))
        return chosen

    def learn(self, channel: str, positions: np.ndarray, answer: np.ndarray) -> None:
        """Notes which of the keys at `positions` are far: those answered with NaN."""
        self._far[channel][positions] = np.isnan(answer)
