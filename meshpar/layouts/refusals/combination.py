"""Combinations: a layout beside the model, lowering, schedule and mode it trains with.

The table of refusals (`refusals`) looks at these facts alone. Models, schedules and
modes give theirs as traits, so that the table knows no strategy and needs no devices.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from meshpar.errors import shown
from meshpar.layouts.grammar import write_items

JIT, SHARD_MAP, AUTO = "jit", "shard_map", "auto"
"""Values of `lowering=`: the compiler writes collectives, meshpar does, or the better
of both is taken."""


class ModelTraits(NamedTuple):
    """Facts of a model that layouts may need.

    Attributes:
      depth: layers of the stack; 0 for a model without layers.
      pattern: number of the model's own layers that each of them runs.
      evaluates: whether evaluation runs the layers too.
      changed: path of an array that training changes by the whole batch, or "".
      caches: whether the model gives a cache, by which it generates.
      streams: whether generation runs it layer by layer.
    """

    depth: int = 0
    pattern: int = 1
    evaluates: bool = True
    changed: str = ""
    caches: bool = False
    streams: bool = False


class PipelineTraits(NamedTuple):
    """Facts of the pipeline of a layout.

    Attributes:
      schedule: name of the schedule, which "auto" has chosen.
      asynchronous: whether stages update their weights by themselves (PipeDream).
      reorders_layers: whether layers are stored in another order than the model's.
      problem: why schedule or partition cannot be, with the remedy; "" if they can.
    """

    schedule: str
    asynchronous: bool = False
    reorders_layers: bool = False
    problem: str = ""


class ModeTraits(NamedTuple):
    """Facts of an optimizer mode.

    Attributes:
      name: of its class.
      has_replicas: whether its parts are replicas of one program; otherwise they are
        programs, which have none.
      several_programs: whether it has several programs for one lowering.
    """

    name: str
    has_replicas: bool
    several_programs: bool


@functools.cache
def _defaults(kind: type) -> dict[str, Any]:
    """{name: default} of every field of a layout."""
    return {field.name: field.default for field in dataclasses.fields(kind)}


@functools.lru_cache(maxsize=1024)
def _setting(name: str, value: Any) -> str:
    """A field of a layout and its value, as in the string of the layout."""
    return shown(write_items({name: value}))


def _no_pipeline(layout: Any) -> None:
    """The pipeline of a layout of which no schedule is known."""
    del layout


@dataclasses.dataclass(frozen=True)
class Combination:
    """A layout, model, mode and lowering that are asked for together.

    Attributes:
      layout: a `Layout`.
      model: traits of the model.
      lowering: the argument of `lower`; "" for the default.
      mode: traits of the optimizer mode, if there is one.
      clip_norm: largest global gradient norm, or None.
      pipelines: gives the traits of a layout's pipeline.
    """

    layout: Any
    model: ModelTraits = ModelTraits()
    lowering: str = ""
    mode: ModeTraits | None = None
    clip_norm: float | None = None
    pipelines: Callable[[Any], PipelineTraits | None] = _no_pipeline

    @property
    def layered(self) -> bool:
        """Whether the model has layers."""
        return self.model.depth > 0

    @functools.cached_property
    def pipeline(self) -> PipelineTraits | None:
        """Traits of the pipeline; None without one."""
        if self.layout.pipe == 1 or not self.layered:
            return None
        return self.pipelines(self.layout)

    @property
    def lowerings(self) -> tuple[str, ...]:
        """The lowerings of which one has to be possible, the default one first."""
        if self.lowering in (JIT, SHARD_MAP):
            return (self.lowering,)
        return (SHARD_MAP, JIT) if self.layered else (JIT,)

    def default(self, name: str) -> Any:
        """The default of a field of the layout."""
        return _defaults(type(self.layout))[name]

    def settings(self, *names: str) -> list[str]:
        """Fields of the layout that do not have their default, as in its string."""
        layout, defaults = self.layout, _defaults(type(self.layout))
        return [
            _setting(name, value)
            for name in names
            if (value := getattr(layout, name)) != defaults[name]
        ]

    def altered(self, changes: dict[str, Any]) -> "Combination":
        """A copy with a layout whose fields are changed, unchecked."""
        layout = self.layout.unchecked(changes)
        return dataclasses.replace(self, layout=layout)
