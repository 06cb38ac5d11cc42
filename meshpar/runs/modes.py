"""Optimizer modes by name (`--optimizer_mode`): synchronous, local SGD, islands.

A new mode needs an entry in `MODES` and a dataclass of settings, which is a field of
`Config` under the mode's name.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import optax

from meshpar import local_sgd
from meshpar.islands.consistency import ConsistencyText, parse_consistency
from meshpar.islands.mode import GRADIENTS, WEIGHTS, Islands
from meshpar.islands.push_filters import FilterTexts, parse_filters
from meshpar.local_sgd import LocalSGD
from meshpar.lowering.mode import Mode
from meshpar.settings import LARGEST, Choice, Number, helps, ranges, real

SYNCHRONOUS, LOCAL_SGD, ISLANDS = "synchronous", "local_sgd", "islands"


MAX_STEPS = 2**24
"""Most steps of a run; learning rates count steps in float32, exactly up to here."""


def _settings_of(library: type) -> Callable[[type], type]:
    """Makes a frozen dataclass of a mode's settings, and of those that its body writes.

    A field of the body stands in place of the mode's field with its name, where that
    one holds an object: the body's is a text. All others are as the mode has them, with
    default, range and help.

    Args:
      library: the dataclass of the mode.
    """

    def make(body: type) -> type:
        own, allowed, kinds = body.__annotations__, ranges(library), {}
        for field in dataclasses.fields(library):
            kinds[field.name] = Annotated[type(field.default), allowed[field.name]]
            if field.name not in own:
                setattr(body, field.name, field.default)
        kinds |= own
        texts = helps(library) | helps(body)
        summary, *_ = inspect.getdoc(body).split("\n")
        entries = (f"  {name}: {texts[name]}" for name in kinds)
        body.__doc__ = "\n".join([summary, "", "Attributes:", *entries])
        body.__annotations__ = kinds
        return dataclasses.dataclass(frozen=True)(body)

    return make


OUTERS: dict[str, Callable[[Any], optax.GradientTransformation | None]] = {
    "average": lambda _: None,
    "sgd": lambda settings: optax.sgd(
        settings.outer_learning_rate, settings.outer_momentum or None
    ),
    "nesterov": lambda settings: optax.sgd(
        settings.outer_learning_rate, settings.outer_momentum, nesterov=True
    ),
}
"""{name: (settings -> optimizer of the global weights)}; None takes the average."""

MERGES: dict[str, Callable[[Any], Any]] = {
    "shift": lambda _: local_sgd.Shift(),
    "overwrite": lambda _: local_sgd.Overwrite(),
    "lerp": lambda settings: local_sgd.Lerp(settings.merge_weight),
    "elastic": lambda settings: local_sgd.Elastic(settings.merge_weight),
}
"""{name: (settings -> merge)}."""

GOSSIP = ("", "ring", "exponential")
"""Graphs along which replicas average; "" for all of them together."""


@_settings_of(LocalSGD)
class LocalSGDConfig:
    """Settings of `LocalSGD` as numbers and texts.

    Attributes:
      outer: how the global weights move: to the "average" of the replicas, or towards
        it by steps of "sgd" or "nesterov".
      merge: how a replica takes the global weights that arrive: "shift" keeps its own
        steps since the snapshot, "overwrite" drops them, "lerp" mixes both weights,
        "elastic" pulls both together.
      gossip: graph along which replicas average with their neighbours alone: "ring" or
        "exponential"; empty for one average of all.
      warmup_steps: steps at the start that synchronize every step (post-local SGD).
      outer_learning_rate: learning rate of "sgd" and "nesterov".
      outer_momentum: momentum of "sgd" and "nesterov".
      merge_weight: share of a replica's own weights in "lerp"; moving rate alpha of
        "elastic".
    """

    outer: Annotated[str, Choice(tuple(OUTERS))] = "average"
    merge: Annotated[str, Choice(tuple(MERGES))] = "shift"
    gossip: Annotated[str, Choice(GOSSIP)] = ""
    warmup_steps: Annotated[int, Number(0, MAX_STEPS, "steps")] = 0
    outer_learning_rate: Annotated[float, real(0, LARGEST)] = 0.4
    outer_momentum: Annotated[float, real(0, 1, below=True)] = 0.9
    merge_weight: Annotated[float, real(0, 1)] = 0.5

    @property
    def unread(self) -> dict[str, str]:
        found = {}
        if OUTERS[self.outer](self) is None:
            names = "outer_learning_rate", "outer_momentum"
            found |= dict.fromkeys(names, f"local_sgd.outer={self.outer}")
        if self.merge not in ("lerp", "elastic"):
            found["merge_weight"] = f"local_sgd.merge={self.merge}"
        return found


@_settings_of(Islands)
class IslandsConfig:
    """Settings of `Islands` as numbers and texts."""

    consistency: Annotated[str, ConsistencyText()] = "ssp:1"
    filters: Annotated[str, FilterTexts()] = ""

    @property
    def unread(self) -> dict[str, str]:
        names = []
        if self.algorithm in WEIGHTS:
            names += ["server_optimizer", "local_learning_rate"]
        has_momentum = self.algorithm == "diloco" or (
            self.algorithm in GRADIENTS and self.server_optimizer == "sgd"
        )
        names += [] if has_momentum else ["momentum"]
        names += [] if self.algorithm == "easgd" else ["alpha"]
        names += [] if self.algorithm == "compensated" else ["compensation"]
        chosen = f"islands.algorithm={self.algorithm}"
        chosen += f", islands.server_optimizer={self.server_optimizer}"
        found = dict.fromkeys(names, chosen)
        if not self.quorum:
            found["grace"] = "islands.quorum=0"
        if self.wire == "f32" and not self.filters:
            found["error_feedback"] = "islands.wire=f32"
        if not self.budget:
            found["order"] = "islands.budget=0"
        return found


def _local_sgd(settings: LocalSGDConfig) -> LocalSGD:
    """Raises StalenessError for settings that contradict each other."""
    period = settings.period
    if settings.warmup_steps:
        period = local_sgd.warm_up(settings.warmup_steps, period)
    return LocalSGD(
        period=period,
        staleness=settings.staleness,
        fragments=settings.fragments,
        outer=OUTERS[settings.outer](settings),
        merge=MERGES[settings.merge](settings),
        wire=settings.wire,
        error_feedback=settings.error_feedback,
        gossip=local_sgd.Gossip(settings.gossip) if settings.gossip else None,
        damping=settings.damping,
    )


def _islands(settings: IslandsConfig) -> Islands:
    """Raises MeshparError for settings that contradict each other."""
    values = dataclasses.asdict(settings)
    consistency = parse_consistency(values.pop("consistency"))
    filters = parse_filters(values.pop("filters"))
    return Islands(consistency=consistency, filters=filters, **values)


MODES: dict[str, Callable[[Any], Mode | None]] = {
    SYNCHRONOUS: lambda _: None,
    LOCAL_SGD: _local_sgd,
    ISLANDS: _islands,
}
"""{name: (settings -> mode)}; None for `meshpar.lower` is synchronous training.

The settings are the field of `Config` with the mode's name, or None without such a
field.
"""
