"""Optimizer modes by name (`--optimizer_mode`): synchronous, local SGD, islands.

A new mode needs an entry in `MODES` and a dataclass of settings, which is a field of
`Config` under the mode's name.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

import meshpar
from meshpar.islands.consistency import parse_consistency
from meshpar.lowering.mode import Mode

SYNCHRONOUS, LOCAL_SGD, ISLANDS = "synchronous", "local_sgd", "islands"


@dataclasses.dataclass(frozen=True)
class LocalSGDConfig:
    """How replicas that train apart are synchronized (`meshpar.LocalSGD`).

    Attributes:
      period: H, steps between synchronizations.
      warmup_steps: steps with period 1 at the start (post-local SGD).
      staleness: s, steps until a synchronization arrives.
      fragments: number of parts that are synchronized one after the other.
      outer: optimizer of the global weights: "average", "sgd" or "nesterov".
      outer_learning_rate: learning rate of "sgd" and "nesterov".
      outer_momentum: momentum of "sgd" and "nesterov".
      merge: "shift", "overwrite", "lerp" or "elastic".
      merge_weight: weight of a replica's own parameters in "lerp"; alpha of "elastic".
      wire: compression: "f32", "bf16", "int8", "int4" or "topk:FRACTION".
      error_feedback: whether the error of compression is added to the next message.
      gossip: "", "ring" or "exponential".
      damping: late updates shrink by (1 + staleness) ** -damping.
    """

    period: int = 32
    warmup_steps: int = 0
    staleness: int = 0
    fragments: int = 1
    outer: str = "average"
    outer_learning_rate: float = 0.4
    outer_momentum: float = 0.9
    merge: str = "shift"
    merge_weight: float = 0.5
    wire: str = "f32"
    error_feedback: bool = True
    gossip: str = ""
    damping: float = 0.0


@dataclasses.dataclass(frozen=True)
class IslandsConfig:
    """Islands that train at their own pace (`meshpar.islands.Islands`).

    Attributes:
      workers: number of islands; each trains under the layout, on devices of its own.
      algorithm: "downpour", "damped", "compensated", "easgd" or "diloco".
      consistency: "bsp", "ssp:S", "asp" or "bounded_delay:TAU".
      fetch: steps between pulls.
      push: steps between pushes.
      server_optimizer: optimizer of the store: "adagrad", "adam" or "sgd".
      learning_rate: learning rate of the store.
      momentum: of the store's "sgd", and of "diloco".
      local_learning_rate: learning rate between pulls, where gradients are pushed.
      alpha: moving rate of "easgd".
      compensation: strength of "compensated".
      warm_start: steps that the first island trains alone.
      quorum: islands whose pushes make an average; 0 for the consistency's own rule.
      grace: seconds that an average waits for more islands after its quorum is there.
      wire: format of pushes: "f32", "bf16", "int8", "int4" or "topk:FRACTION".
      error_feedback: whether the error of compression is added to the next push.
      servers: servers of the store.
      replicas: servers that hold each range.
      ranges: parts into which the weights are cut.
      host: "threads" of this process, or "ray".
    """

    workers: int = 2
    algorithm: str = "downpour"
    consistency: str = "ssp:1"
    fetch: int = 1
    push: int = 1
    server_optimizer: str = "adagrad"
    learning_rate: float = 0.02
    momentum: float = 0.9
    local_learning_rate: float = 0.01
    alpha: float = 0.1
    compensation: float = 0.04
    warm_start: int = 0
    quorum: int = 0
    grace: float = 0.0
    wire: str = "f32"
    error_feedback: bool = True
    servers: int = 1
    replicas: int = 1
    ranges: int = 4
    host: str = "threads"


OUTERS: dict[str, Callable[[LocalSGDConfig], optax.GradientTransformation | None]] = {
    "average": lambda _: None,
    "sgd": lambda settings: optax.sgd(
        settings.outer_learning_rate, settings.outer_momentum or None
    ),
    "nesterov": lambda settings: optax.sgd(
        settings.outer_learning_rate, settings.outer_momentum, nesterov=True
    ),
}
"""Optimizers of the global weights by name; None takes the average."""

MERGES: dict[str, Callable[[LocalSGDConfig], Any]] = {
    "shift": lambda _: meshpar.local_sgd.Shift(),
    "overwrite": lambda _: meshpar.local_sgd.Overwrite(),
    "lerp": lambda settings: meshpar.local_sgd.Lerp(settings.merge_weight),
    "elastic": lambda settings: meshpar.local_sgd.Elastic(settings.merge_weight),
}
"""Merges by name."""

GOSSIP = ("", "ring", "exponential")
"""Graphs along which replicas average; "" for all of them together."""


def _local_sgd(settings: LocalSGDConfig) -> meshpar.LocalSGD:
    """Raises StalenessError for settings that contradict each other."""
    period = settings.period
    if settings.warmup_steps:
        period = meshpar.local_sgd.warm_up(settings.warmup_steps, period)
    return meshpar.LocalSGD(
        period=period,
        staleness=settings.staleness,
        fragments=settings.fragments,
        outer=OUTERS[settings.outer](settings),
        merge=MERGES[settings.merge](settings),
        wire=settings.wire,
        error_feedback=settings.error_feedback,
        gossip=meshpar.local_sgd.Gossip(settings.gossip) if settings.gossip else None,
        damping=settings.damping,
    )


def _islands(settings: IslandsConfig) -> meshpar.islands.Islands:
    """Raises MeshparError for settings that contradict each other."""
    values = dataclasses.asdict(settings)
    consistency = parse_consistency(values.pop("consistency"))
    return meshpar.islands.Islands(consistency=consistency, **values)


MODES: dict[str, Callable[[Any], Mode | None]] = {
    SYNCHRONOUS: lambda _: None,
    LOCAL_SGD: _local_sgd,
    ISLANDS: _islands,
}
"""{name: (settings -> mode)}; None for `meshpar.lower` is synchronous training.

The settings are the field of `Config` with the mode's name, or None without such a
field.
"""
