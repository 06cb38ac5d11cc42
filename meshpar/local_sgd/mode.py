"""Local SGD with bounded staleness: the mode and its settings.

Replicas train separately. Every `period` (H) steps each fragment of the weights is
averaged over the replicas: a snapshot is taken after step t, travels during the next
steps, moves the global weights by an outer optimizer, and is merged into the replicas
after step t + `staleness` (s). The bound 0 <= s < H, with s <= H / fragments, is
checked when the mode is made and again whenever a fragment arrives.

    H=1, s=0, outer SGD(1)        synchronous data parallelism for SGD with momentum
    s=0, outer Nesterov           DiLoCo
    fragments, s > 0, `Lerp`      Streaming DiLoCo
    `Elastic`                     elastic averaging (EASGD)
    `gossip`                      averages over neighbours only (D-PSGD)

With Adam as the inner optimizer, H=1 is not synchronous training: every replica divides
by moments of its own gradients, and the mean of those quotients is not the quotient of
the means.

Source: Stich, Local SGD, arXiv:1805.09767; Douillard et al., DiLoCo, arXiv:2311.08105
  and Streaming DiLoCo, arXiv:2501.18512 (fragments, delay, lerp, 4-bit wire); Lin et
  al., post-local SGD, arXiv:1808.07217; Zhang et al., EASGD, arXiv:1412.6651.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated

import optax

from meshpar.collectives.compression import Wire
from meshpar.errors import StalenessError
from meshpar.layouts.refusals.combination import ModeTraits
from meshpar.local_sgd.gossip import Gossip
from meshpar.local_sgd.merges import Elastic, Merge, Overwrite, Shift
from meshpar.local_sgd.outer_identity import outer_identity
from meshpar.local_sgd.schedule import SyncSchedule
from meshpar.settings import Instance, Number, Switch, check, ranges, real

_CHECKED_STEPS = 100_000
"""Steps up to which a period that is a function is checked when the mode is made."""

_IDENTITY_STEPS = 10_000
"""Steps up to which a period that is a function is written into the identity."""

_STEPS = Number(1, 2**25, "steps")
_OUTER = Instance(optax.GradientTransformation | None, "an optax optimizer")
_MERGE = Instance(Merge, "Shift(), Overwrite(), Lerp(own) or Elastic(alpha)")
_GOSSIP = Instance(Gossip | None, 'Gossip("ring")')


def warm_up(steps: int, period: int) -> Callable[[int], int]:
    """A period of 1 for some steps, then a longer one (post-local SGD).

    With the default outer optimizer and merge the first steps are synchronous training.

    Args:
      steps: steps with a period of 1.
      period: H after them.

    Raises:
      StalenessError: `steps` is no whole number or is negative.

    Source: Lin et al., post-local SGD, arXiv:1808.07217, section 3.
    """
    if not isinstance(steps, int) or steps < 0:
        raise StalenessError(f"warm_up(steps={steps!r}): use a whole number >= 0")
    return lambda step: 1 if step < steps else period


@dataclasses.dataclass(frozen=True)
class LocalSGD:
    """Local SGD: how replicas that train separately are synchronized.

    Attributes:
      period: steps between two synchronizations of a fragment (H); 1 synchronizes all
        fragments at once. In Python also a function from the step at which a period
        begins to its length.
      staleness: steps that a synchronization travels while training goes on (s); with 0
        training waits for it.
      fragments: parts of the weights of equal size, synchronized one after the other
        (F).
      outer: optimizer of the global weights, run elementwise on shards; its gradient is
        global minus average weights. The default is SGD(1), which takes the average.
      merge: how a replica combines its weights with the global weights that arrive.
      wire: format of what travels, both ways: "f32", "bf16", "int8", "int4" or
        "topk:FRACTION".
      error_feedback: whether the error of a lossy format is added to the next message.
      gossip: a graph; replicas average with its neighbours instead of all replicas.
      damping: updates are multiplied by (1 + staleness) ** -damping; 0 for no damping.

    Raises:
      StalenessError: the bound does not hold, or two settings contradict each other.
      MeshparError: an unknown wire format.

    Source (damping 1): Zhang et al., Staleness-aware Async-SGD, arXiv:1511.05950.
      (error feedback): Karimireddy et al., arXiv:1901.09847.
    """

    period: Annotated[int | Callable[[int], int], _STEPS] = 32
    staleness: Annotated[int, Number(0, 2**24, "steps")] = 0
    fragments: Annotated[int, Number(1, 2**16, "fragments")] = 1
    outer: Annotated[optax.GradientTransformation | None, _OUTER] = None
    merge: Annotated[Merge, _MERGE] = Shift()
    wire: Annotated[str, Wire()] = "f32"
    error_feedback: Annotated[bool, Switch()] = True
    gossip: Annotated[Gossip | None, _GOSSIP] = None
    damping: Annotated[float, real(0, 100)] = 0.0

    def __post_init__(self):
        check(self, error=StalenessError, but=["period"])
        if self.outer is not None and isinstance(self.merge, Elastic):
            raise StalenessError(
                "merge=Elastic sets the outer optimizer itself: leave `outer` out"
            )
        self._check_gossip()
        if callable(self.period):
            SyncSchedule(self).check_until(_CHECKED_STEPS)
        else:
            self.check_period(self.period)

    def _check_gossip(self) -> None:
        if self.gossip is None:
            return
        for setting, excluded in (
            ("outer", self.outer is not None),
            (f"merge={self.merge}", not isinstance(self.merge, Overwrite | Shift)),
            (f"wire={self.wire}", self.wire not in ("f32", "bf16")),
            (f"damping={self.damping}", self.damping != 0),
        ):
            if excluded:
                raise StalenessError(
                    "gossip averages weights with neighbours and has no global weights:"
                    f" leave out {setting}"
                )

    def check_period(self, period: int) -> None:
        """Raises StalenessError unless the bound holds for a period."""
        s, fragments = self.staleness, self.fragments
        if problem := ranges(LocalSGD)["period"].problem(period):
            raise StalenessError(f"period={period!r}: {problem}")
        if callable(self.period) and period == 1:
            return  # All fragments are synchronized at once, so none is late.
        if s >= period:
            raise StalenessError(
                f"staleness={s} with period={period}: a synchronization has to arrive "
                f"before the next one, 0 <= staleness < period; use at most "
                f"{period - 1}"
            )
        if fragments > period:
            raise StalenessError(
                f"fragments={fragments} with period={period}: at most one fragment is "
                f"synchronized per step; use at most {period} fragments"
            )
        if s * fragments > period:
            raise StalenessError(
                f"staleness={s} with period={period}, fragments={fragments}: one "
                f"fragment travels at a time, staleness <= period / fragments; use at "
                f"most {period // fragments}"
            )

    @property
    def traits(self) -> ModeTraits:
        """Facts of the mode at which the table of refusals looks."""
        return ModeTraits("LocalSGD", has_replicas=True, several_programs=True)

    def identity(self) -> str:
        """The mode as text; of `outer`, a hash of what its update computes."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("outer", "period")
        }
        period = self.period
        if callable(period):
            schedule = SyncSchedule(self)
            schedule.check_until(_IDENTITY_STEPS)
            period = schedule.starts
        outer = "average" if self.outer is None else outer_identity(self.outer)
        return f"period={period}, {fields}, outer={outer}"

    @property
    def num_slices(self) -> int:
        """S, the slices in which a fragment travels; one is scattered per step."""
        if self.gossip is not None:
            return max(1, self.staleness)
        # The last step only gathers, and the steps before it gather the previous slice.
        return max(1, self.staleness - 1)

    @property
    def gathers(self) -> bool:
        """Whether slices are gathered after the outer step; gossip only mixes."""
        return self.gossip is None
