"""Versions of weights in PipeDream: weight stashing, vertical sync, double buffers.

Version v of a stage's weights has seen v of its updates. With n stages of one worker
each, stages and minibatches counted from 0, minibatch t uses on stage s

    newest           version max(0, t - (n-1-s)) forward and the newest one, t, backward
    stashed          version max(0, t - (n-1-s)) in both passes
    vertical_sync    version max(0, t - (n-1)) on all stages
    double_buffered  version max(0, k-1) on all stages, in update k of `accumulate`
                     minibatches each

so that stashed weights follow w(t+1) = w(t) - lr grad f(w_0(t-n+1), ..., w_n-1(t)),
vertical sync w(t+1) = w(t) - lr grad f(w(t-n+1)), and double buffers
w(k+1) = w(k) - lr grad f(w(k-1)). "newest" is the pipeline that PipeDream mends: its
backward pass uses other weights than the forward pass.

Source: Narayanan et al., PipeDream, SOSP 2019, section 3.3; Narayanan et al.,
  Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021, arXiv:2006.09503,
  section 3.1 (2BW).
"""

import dataclasses

from meshpar.errors import MeshparError
from meshpar.methods.pipedream.order import warm_up

NEWEST, STASHED = "newest", "stashed"
VERTICAL_SYNC, DOUBLE_BUFFERED = "vertical_sync", "double_buffered"
POLICIES = NEWEST, STASHED, VERTICAL_SYNC, DOUBLE_BUFFERED


@dataclasses.dataclass(frozen=True)
class Versions:
    """The versions of weights that each stage uses for each minibatch.

    Attributes:
      replicas: workers of each stage.
      policy: one of `POLICIES`.
      accumulate: minibatches of an update with double buffers.

    Raises:
      MeshparError: a policy that does not exist, or too few minibatches in an update.
    """

    replicas: tuple[int, ...]
    policy: str = STASHED
    accumulate: int = 0

    def __post_init__(self):
        if self.policy not in POLICIES:
            raise MeshparError(f"weights={self.policy!r}: use one of {POLICIES}")
        if self.policy != DOUBLE_BUFFERED:
            if self.accumulate:
                raise MeshparError(
                    f"accumulate={self.accumulate} with weights={self.policy}: it is "
                    f"for weights={DOUBLE_BUFFERED} alone; leave it out"
                )
            return
        least = max(
            ahead * count
            for ahead, count in zip(warm_up(self.replicas), self.replicas, strict=True)
        )
        if self.accumulate < least or any(self.accumulate % r for r in self.replicas):
            raise MeshparError(
                f"accumulate={self.accumulate} with stages of {self.replicas} workers: "
                f"two versions are enough for at least {least} minibatches per update, "
                "and a multiple of the workers of each stage"
            )

    def per_update(self, stage: int) -> int:
        """Minibatches whose mean gradient makes one update of a stage."""
        return self.accumulate or self.replicas[stage]

    def update_of(self, stage: int, minibatch: int) -> int:
        """The update of a stage that a minibatch's gradient is part of."""
        return minibatch // self.per_update(stage)

    def forward(self, stage: int, minibatch: int) -> int:
        """The version that a forward pass uses."""
        if self.policy == DOUBLE_BUFFERED:
            return max(0, minibatch // self.accumulate - 1)
        if self.policy == VERTICAL_SYNC:
            seen = self._newest(0, minibatch) * self.replicas[0]
            return seen // self.replicas[stage]
        return self._newest(stage, minibatch)

    def backward(self, stage: int, minibatch: int) -> int:
        """The version that a backward pass uses."""
        if self.policy == NEWEST:
            return self.update_of(stage, minibatch)
        return self.forward(stage, minibatch)

    def _newest(self, stage: int, minibatch: int) -> int:
        """Updates that the stage has done when a worker comes to this forward pass."""
        turn = minibatch // self.replicas[stage]
        return max(0, turn - warm_up(self.replicas)[stage] + 1)
