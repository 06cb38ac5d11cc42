"""Configuration of a run: frozen dataclasses, and typed settings of single values.

`--set steps=400` changes one value. A key that does not exist is an error that names
the nearest key.
"""

import abc
import contextlib
import dataclasses
import functools
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, Self

from meshpar.compose import LOWERINGS
from meshpar.errors import ConfigError, MeshparError, nearest, shown
from meshpar.layouts.axes import DATA
from meshpar.layouts.grammar import LONGEST
from meshpar.runs.modes import (
    MAX_STEPS,
    MODES,
    SYNCHRONOUS,
    IslandsConfig,
    LocalSGDConfig,
)
from meshpar.runs.run import Run
from meshpar.settings import (
    Choice,
    Number,
    Path,
    Range,
    Text,
    helps,
    range_of,
    ranges,
    real,
)

AUTO = "auto"
"""The layout that the planner chooses."""

_LIMIT = real(0, 1e7, "seconds", "0 for never")
_LOCAL = Number(0, 10**9, "steps", "0 for checkpoint_every")
_CHECK = Number(0, 10**9, "steps", "0 for never")


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
    """Limits of the sections of a run, in seconds; 0 for any time.

    A section that takes longer ends the run, to be started again. Steps have a limit of
    their own, `watchdog_seconds`.

    Attributes:
      start: longest time of reading the data, lowering, and restoring the checkpoint.
      first_step: longest time of compiling and running the first step.
      evaluation: longest time of an evaluation; the first one compiles.
      save: longest time of starting a checkpoint, after the one before it is complete.
      end: longest time of completing the last checkpoint, the plot and the sample.
    """

    start: Annotated[float, _LIMIT] = 3600.0
    first_step: Annotated[float, _LIMIT] = 7200.0
    evaluation: Annotated[float, _LIMIT] = 3600.0
    save: Annotated[float, _LIMIT] = 1800.0
    end: Annotated[float, _LIMIT] = 3600.0


OF_MODEL, OF_TRAINING, NEUTRAL = "model", "training", "neutral"
"""Kinds of changes between a checkpoint and the run that resumes it."""

_NEUTRAL = {
    *("recipe", "layout", "lowering", "workdir", "watchdog_seconds"),
    *("evaluate_every", "evaluation_batches", "checkpoint_every", "keep_checkpoints"),
    *("checkpoint_local_dir", "checkpoint_local_every", "check_replicas"),
}
"""Fields that change no step."""


@dataclasses.dataclass(frozen=True)
class RunConfig(abc.ABC):
    """The settings of any run; subclasses add the settings of a recipe.

    Attributes:
      recipe: the recipe, as `--recipe` names it.
      optimizer_mode: how devices share updates: "synchronous" in every step,
        "local_sgd" every few steps, "islands" each at its own pace.
      local_sgd: how replicas are synchronized under optimizer_mode="local_sgd".
      islands: how islands train under optimizer_mode="islands".
      layout: the layout, such as "data=2,fsdp=2,tensor=2"; empty for the recipe's, and
        "auto" for the planner's best.
      lowering: who writes the collectives: "shard_map" for meshpar, "jit" for the
        compiler, "auto" for the better of the two as compiled; empty for shard_map
        where the model supports it, else jit.
      compute_dtype: format of activations and matmuls, "float32" or "bfloat16"; the
        weights that are trained are float32.
      batch_size: samples, such as sequences, per step, over all devices together.
      steps: training steps of the whole run, with those before it resumes.
      seed: seed of initialization, dropout and shuffling.
      evaluate_every: steps between two evaluations.
      evaluation_batches: most batches of one evaluation.
      checkpoint_every: steps between two checkpoints.
      keep_checkpoints: newest checkpoints that are kept; older ones are deleted.
      checkpoint_local_dir: folder on a disk of each machine where each process also
        keeps its own shards; empty for none.
      checkpoint_local_every: steps between local checkpoints; 0 for `checkpoint_every`.
      check_replicas: steps between two comparisons of tensors that several devices hold
        and that must be equal; 0 for never.
      watchdog_seconds: a run of several processes ends, to be started again, when no
        step finishes for this long and for 20 times the median step; 0 for never.
      watchdog: limits of the other sections of a run.
      workdir: folder of metrics, checkpoints and plot; empty for runs/RECIPE.
    """

    recipe: Annotated[str, Text(4096)]
    optimizer_mode: Annotated[str, Choice(tuple(MODES))] = SYNCHRONOUS
    local_sgd: LocalSGDConfig = LocalSGDConfig()
    islands: IslandsConfig = IslandsConfig()
    layout: Annotated[str, Text(LONGEST)] = ""
    lowering: Annotated[str, Choice(("", "auto", *LOWERINGS))] = ""
    compute_dtype: Annotated[str, Choice(("float32", "bfloat16"))] = "float32"
    batch_size: Annotated[int, Number(1, 2**24, "samples")] = 32
    steps: Annotated[int, Number(1, MAX_STEPS, "steps")] = 200
    seed: Annotated[int, Number(0, 2**32 - 1)] = 0
    evaluate_every: Annotated[int, Number(1, 10**9, "steps")] = 50
    evaluation_batches: Annotated[int, Number(1, 10**6, "batches")] = 4
    checkpoint_every: Annotated[int, Number(1, 10**9, "steps")] = 50
    keep_checkpoints: Annotated[int, Number(1, 10**6, "checkpoints")] = 2
    checkpoint_local_dir: Annotated[str, Path()] = ""
    checkpoint_local_every: Annotated[int, _LOCAL] = 0
    check_replicas: Annotated[int, _CHECK] = 0
    watchdog_seconds: Annotated[float, _LIMIT] = 300.0
    watchdog: WatchdogConfig = WatchdogConfig()
    workdir: Annotated[str, Path()] = ""

    FORMER_NAMES: typing.ClassVar[Mapping[tuple[type, str], str]] = {}
    """{(dataclass, former name of a field): its name}, for old commands and runs."""

    def __post_init__(self):
        for key, value in values_of(self):
            check_setting(key, value, kind=type(self))

    @abc.abstractmethod
    def prepared(self) -> tuple[Self, Run]:
        """The configuration completed by the data, and the run that it trains.

        Raises:
          MeshparError: data, model or optimizer that do not fit.
        """

    @property
    def code(self) -> Mapping[str, str]:
        """{file: hash} of the user's code that makes the run, the recipe's file first.

        Recipes of this version have none.
        """
        return {}

    def blaming_recipe(self) -> contextlib.AbstractContextManager[None]:
        """Makes a RecipeError, with the line, of errors of the recipe's own code."""
        return contextlib.nullcontext()

    @property
    def unread(self) -> Mapping[str, str]:
        """{key of a setting that nothing reads: the values because of which}.

        A dataclass of settings may have the same property. A mode's settings that
        another mode leaves unread are `make_mode`'s to refuse, as some commands choose
        the mode themselves.
        """
        return {}

    def default_layout(self, num_devices: int) -> str:
        """The layout where none is given."""
        return f"{DATA}={num_devices}"

    def kind_of_change(self, key: str) -> str:
        """The kind of a changed setting: `OF_MODEL`, `OF_TRAINING` or `NEUTRAL`."""
        return NEUTRAL if key in _NEUTRAL else OF_TRAINING

    @property
    def decides_samples(self) -> frozenset[str]:
        """Settings that a run compares on their own: they choose the next samples."""
        return frozenset({"seed"})

    @property
    def plan_facts(self) -> dict[str, Any]:
        """{name: value} of settings on which the planner's choice depends."""
        own = {field.name for field in dataclasses.fields(type(self))}
        own -= {field.name for field in dataclasses.fields(RunConfig)}
        fields = dataclasses.asdict(self)
        return {name: fields[name] for name in (*own, "compute_dtype", "batch_size")}


class Setting(NamedTuple):
    """A key of `--set`.

    Attributes:
      default: the value without a recipe; None if every recipe has one.
      range: the values that are allowed.
      help: the meaning, in one sentence.
    """

    default: Any
    range: Range
    help: str


def _settings_in(
    kind: type, defaults: Any, prefix: str = ""
) -> Iterator[tuple[str, Setting]]:
    """Generates (key, setting) of a dataclass's fields, nested ones included."""
    known, texts, hints = ranges(kind), helps(kind), typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name, default = field.name, getattr(defaults, field.name, None)
        if dataclasses.is_dataclass(default):
            yield from _settings_in(type(default), default, f"{prefix}{name}.")
        else:
            allowed = known.get(name) or range_of(hints[name])
            yield f"{prefix}{name}", Setting(default, allowed, texts.get(name, ""))


@functools.cache
def settings_of(kind: type) -> dict[str, Setting]:
    """{key of `--set`: what its field says} of a configuration's class."""
    return dict(_settings_in(kind, kind))


def check_setting(
    key: str, value: Any, text: str | None = None, kind: type = RunConfig
) -> None:
    """Raises ConfigError, with the remedy, for a value outside of its range.

    Bounds are generous: they refuse what no run can mean or no machine can hold.

    Args:
      key: a key of `settings_of(kind)`.
      value: the value, of any type.
      text: the value as it was written, for the message; Python's by default.
      kind: the class of the configuration.
    """
    if problem := settings_of(kind)[key].range.problem(value):
        written = repr(value) if text is None else text
        raise ConfigError(f"{key}={shown(written)}: {problem}")


def values_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Generates (key, value) of a dataclass's fields, nested ones included."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from values_of(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def from_dict(values: Any, whole: type[RunConfig]) -> RunConfig:
    """Makes a configuration from the dict that a checkpoint stores.

    It inverts `dataclasses.asdict`, and accepts former names of fields.

    Args:
      values: {field: value}; dicts for fields that are dataclasses.
      whole: the class of the configuration.

    Raises:
      ConfigError: keys that this version does not have, or values out of range.
    """
    return _from_dict(values, whole, whole, "")


def _from_dict(values: Any, whole: type[RunConfig], kind: type, prefix: str) -> Any:
    """Makes one dataclass of a configuration; `prefix` begins its keys."""
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"the checkpoint's configuration is not a table of fields but "
            f"{shown(repr(values))}; use a checkpoint that a run wrote"
        )
    kinds, fields = _hints(kind), {}
    for key, value in values.items():
        name = whole.FORMER_NAMES.get((kind, key), key)
        if name not in kinds:
            raise ConfigError(
                f"the checkpoint's configuration has {name!r}, which this version does "
                f"not know ({nearest(name, kinds)})"
            )
        if dataclasses.is_dataclass(kinds[name]):
            value = _from_dict(value, whole, kinds[name], f"{prefix}{name}.")
        else:
            check_setting(f"{prefix}{name}", value, kind=whole)
        fields[name] = value
    try:
        return kind(**fields)
    except MeshparError:
        raise
    except (TypeError, ValueError) as error:  # Missing fields, or fields that clash.
        raise ConfigError(
            f"the checkpoint's configuration: {error}; use a checkpoint that "
            "a run wrote"
        ) from error


def _hints(kind: type) -> dict[str, Any]:
    """{field: type} of a dataclass."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _parse_value(text: str, kind: type) -> Any:
    """The value of a text; the text itself if it is of another type."""
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if kind not in (int, float):
        return text
    try:
        return kind(text)
    except ValueError:
        return text


class _Change(NamedTuple):
    """A value that a setting gives to a field, with the text that it was written as."""

    value: Any
    text: str


_Path = tuple[str, ...]
"""Names of fields, from the outermost dataclass to the innermost."""


def _parsed(config: "RunConfig", key: str, text: str) -> tuple[_Path, _Change]:
    """(path of the field, its value) of a setting, which is in its range.

    Raises:
      ConfigError: a key that does not exist, or a value of the wrong type or out of
        range.
    """
    whole, value, path, kind = type(config), config, (), str
    for name in key.split("."):
        if not dataclasses.is_dataclass(value):
            group = ".".join(path)
            raise ConfigError(
                f"--set {shown(key)}: {path[-1]} has no parts; write {group}=VALUE"
            )
        kinds = _hints(type(value))
        name = whole.FORMER_NAMES.get((type(value), name), name)
        if name not in kinds:
            known = nearest(name, kinds)
            raise ConfigError(f"--set {shown(key)}: no key {shown(name)!r} ({known})")
        value, path, kind = getattr(value, name), (*path, name), kinds[name]
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        inner = ", ".join(f"{path[-1]}.{field.name}" for field in fields)
        raise ConfigError(f"--set {key}: set one of {inner}")
    new = _parse_value(text, kind)
    check_setting(".".join(path), new, text, whole)
    return path, _Change(new, text)


def _changed(config: Any, changes: Mapping[_Path, _Change], prefix: str = "") -> Any:
    """A dataclass with all changes made at once, as their order must not matter.

    Args:
      config: the configuration, or a dataclass in it.
      changes: {path in it: change}.
      prefix: begins its keys.

    Raises:
      ConfigError: values that do not go together, or that nothing reads.
    """
    fields: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in changes):
        inner = {path[1:]: x for path, x in changes.items() if path[0] == name}
        if () in inner:
            fields[name] = inner[()].value
        else:
            fields[name] = _changed(getattr(config, name), inner, f"{prefix}{name}.")
    written = {f"{prefix}{'.'.join(path)}": x.text for path, x in changes.items()}
    try:
        new = dataclasses.replace(config, **fields)
    except ConfigError:
        raise
    except ValueError as error:
        given = ", ".join(f"{key}={text}" for key, text in written.items())
        raise ConfigError(f"--set {shown(given)}: {error}") from error
    before, after = dict(values_of(config)), dict(values_of(new))
    for name, why in getattr(new, "unread", {}).items():
        key = f"{prefix}{name}"
        if key in written and before[name] != after[name]:
            raise ConfigError(
                f"--set {key}={shown(written[key])}: nothing reads it with {why}; "
                "leave it out, or change that"
            )
    return new


_Config = typing.TypeVar("_Config", bound=RunConfig)


def with_settings(config: _Config, settings: Sequence[str]) -> _Config:
    """Applies `KEY=VALUE` settings such as "model.depth=4", all of them at once.

    Of several with one key the last counts.

    Raises:
      ConfigError: a key that does not exist, a value of the wrong type or out of
        range, values that do not go together, or a value that nothing reads.
    """
    changes: dict[_Path, _Change] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {shown(setting)}: write KEY=VALUE")
        path, change = _parsed(config, key.strip(), text.strip())
        changes[path] = change
    return _changed(config, changes)


def with_mode(config: _Config, mode: str) -> _Config:
    """The configuration under an optimizer mode, with default settings of all modes."""
    fields = [name for name in MODES if hasattr(config, name)]
    defaults = {name: type(getattr(config, name))() for name in fields}
    return dataclasses.replace(config, optimizer_mode=mode, **defaults)
