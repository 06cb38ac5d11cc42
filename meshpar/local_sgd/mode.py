"""Local SGD with bounded staleness: what is synchronized when, and how it is merged.

Replicas train apart. Every `period` (H) steps each fragment of their weights is
averaged: a snapshot is taken at the end of step t, travels beside the steps that
follow, moves the global weights by an outer optimizer, and reaches the replicas at the
end of step t + `staleness` (s). The bound 0 <= s < H, with s <= H / fragments, is held
when the mode is made, and again whenever a fragment arrives.

    H=1, s=0, outer SGD(1)        synchronous data parallelism for SGD with momentum
    s=0, Nesterov outside         DiLoCo
    fragments, s > 0, `Lerp`      streaming DiLoCo
    `Elastic`                     elastic averaging (EASGD)
    `gossip`                      neighbours instead of an average

With Adam inside, H=1 is not synchronous training: every replica divides by moments of
its own gradients, and the mean of those quotients is not the quotient of the means.

Source: Stich, Local SGD, arXiv:1805.09767; Douillard et al., DiLoCo, arXiv:2311.08105
  and Streaming DiLoCo, arXiv:2501.18512 (fragments, delay, lerp, 4-bit wire); Lin et
  al., post-local SGD, arXiv:1808.07217; Zhang et al., EASGD, arXiv:1412.6651.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

from meshpar.collectives.compression import make_compression
from meshpar.errors import StalenessError
from meshpar.local_sgd.gossip import Gossip
from meshpar.local_sgd.merges import Elastic, Merge, Overwrite, Shift
from meshpar.local_sgd.schedule import Schedule

_CHECKED_STEPS = 100_000
"""How far a period that is a function of the step is checked beforehand."""


def warm_up(steps: int, period: int) -> Callable[[int], int]:
    """A period that is 1 for some steps first (post-local SGD).

    With the default outer optimizer and merge those steps are synchronous training.

    Source: post-local SGD, arXiv:1808.07217, section 3.
    """
    return lambda step: 1 if step < steps else period


@dataclasses.dataclass(frozen=True)
class LocalSGD:
    """The mode: how replicas that train apart are synchronized.

    Attributes:
      period: H, steps between two synchronizations of a fragment; or a function from
        the step at which a period begins to its length. In a period of 1 all fragments
        are synchronized together and at once.
      staleness: s, steps between a snapshot and its arrival; 0 waits for it.
      fragments: equal parts of the weights, synchronized one after the other.
      outer: optimizer of the global weights, run elementwise on shards: its gradient
        is global minus average weights. By default SGD(1), which takes the average.
      merge: what a replica makes of the weights that arrive.
      wire: "f32", "bf16", "int8", "int4" or "topk:FRACTION", both ways.
      error_feedback: whether what a lossy wire dropped is sent with the next one.
      gossip: a graph of neighbours to average with, in place of all replicas.
      damping: updates that arrive s steps late shrink by (1 + s) ** -damping.

    Raises:
      StalenessError: a bound that does not hold, with the numbers, or parts that do
        not go together.

    Source (damping 1): Zhang et al., Staleness-aware Async-SGD, arXiv:1511.05950.
      (error feedback): Karimireddy et al., arXiv:1901.09847.
    """

    period: int | Callable[[int], int] = 32
    staleness: int = 0
    fragments: int = 1
    outer: optax.GradientTransformation | None = None
    merge: Merge = Shift()
    wire: str = "f32"
    error_feedback: bool = True
    gossip: Gossip | None = None
    damping: float = 0.0

    def __post_init__(self):
        for name, least in (("staleness", 0), ("fragments", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise StalenessError(f"{name}={value!r}: use a whole number >= {least}")
        if not self.damping >= 0:
            raise StalenessError(f"damping={self.damping}: use 0 or more")
        make_compression(self.wire)
        if self.outer is not None and isinstance(self.merge, Elastic):
            raise StalenessError(
                "merge=Elastic moves the center by itself: leave `outer` out"
            )
        self._check_gossip()
        if callable(self.period):
            Schedule(self).check_until(_CHECKED_STEPS)
        else:
            self.check_period(self.period)

    def _check_gossip(self) -> None:
        if self.gossip is None:
            return
        for setting, bad in (
            ("outer", self.outer is not None),
            (f"merge={self.merge}", not isinstance(self.merge, Overwrite | Shift)),
            (f"wire={self.wire}", self.wire not in ("f32", "bf16")),
            (f"damping={self.damping}", self.damping != 0),
        ):
            if bad:
                raise StalenessError(
                    f"gossip averages weights with neighbours and has no global ones: "
                    f"leave out {setting}"
                )

    def check_period(self, period: int) -> None:
        """Raises StalenessError unless the bound holds for a period."""
        s, fragments = self.staleness, self.fragments
        if not isinstance(period, int) or period < 1:
            raise StalenessError(f"period={period!r}: use a whole number of at least 1")
        if callable(self.period) and period == 1:
            return  # Everything at once.
        if s >= period:
            raise StalenessError(
                f"staleness={s} with period={period}: a synchronization has to arrive "
                f"before the next one, 0 <= staleness < period; use at most "
                f"{period - 1}"
            )
        if fragments > period:
            raise StalenessError(
                f"fragments={fragments} with period={period}: one fragment a step at "
                f"most; use at most {period} fragments"
            )
        if s * fragments > period:
            raise StalenessError(
                f"staleness={s} with period={period}, fragments={fragments}: one "
                f"fragment travels at a time, staleness <= period / fragments; use at "
                f"most {period // fragments}"
            )

    def identity(self) -> str:
        """The mode as text, but for the outer optimizer, whose state tells it."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("outer", "period")
        }
        period = self.period
        if callable(period):
            schedule = Schedule(self)
            schedule.check_until(10_000)
            period = schedule.starts
        return f"period={period}, {fields}"

    @property
    def num_chunks(self) -> int:
        """Pieces in which a fragment travels, one a step."""
        if self.gossip is not None:
            return max(1, self.staleness)
        # The last step only gathers: a chunk is scattered beside the gather before.
        return max(1, self.staleness - 1)


def outer_optimizer(mode: LocalSGD, replicas: int) -> optax.GradientTransformation:
    """What moves the global weights, but for damping.

    Raises:
      StalenessError: an elastic pull that is too strong for so many replicas.
    """
    outer: Any = mode.outer or optax.sgd(1.0)
    if isinstance(mode.merge, Elastic):
        beta = replicas * mode.merge.alpha
        if beta > 1:
            raise StalenessError(
                f"Elastic({mode.merge.alpha}) with replica={replicas}: replicas * alpha"
                f" = {beta:g} moves the center beyond the average; use at most "
                f"{1 / replicas:g}"
            )
        outer = optax.sgd(beta)
    return outer
