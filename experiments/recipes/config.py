"""Configuration of a run: frozen dataclasses, and typed settings of single values.

`--set model.depth=4` changes one value. A key that does not exist is an error that
names the nearest key.
"""

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from experiments.data import DataConfig
from experiments.models.decoder_config import DecoderConfig
from experiments.ranges import Path
from experiments.recipes.errors import ConfigError
from experiments.recipes.modes import (
    MAX_STEPS,
    MODES,
    SYNCHRONOUS,
    IslandsConfig,
    LocalSGDConfig,
)
from meshpar.compose import LOWERINGS
from meshpar.errors import MeshparError, nearest, shown
from meshpar.layouts.grammar import LONGEST
from meshpar.settings import (
    LARGEST,
    SMALLEST,
    Choice,
    Number,
    Range,
    Text,
    helps,
    ranges,
    real,
)

AUTO = "auto"
"""The layout that the planner chooses."""

_LIMIT = real(0, 1e7, "seconds", "0 for never")
_LOCAL = Number(0, 10**9, "steps", "0 for checkpoint_every")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with linear warm-up, cosine decay and global-norm clipping.

    Attributes:
      learning_rate: peak learning rate.
      warmup_steps: steps of linear warm-up.
      final_fraction: learning rate at the last step, as a fraction of the peak.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: decoupled decay of all weight matrices, but not of biases and
        norms.
      clip_norm: largest global gradient norm; 0 for no limit.
      router_bias_rate: step of the bias that balances experts (`model.router_bias`).
    """

    learning_rate: Annotated[float, real(0, LARGEST)] = 4e-3
    warmup_steps: Annotated[int, Number(0, MAX_STEPS, "steps")] = 20
    final_fraction: Annotated[float, real(0, 1)] = 0.1
    b1: Annotated[float, real(0, 1, below=True)] = 0.9
    b2: Annotated[float, real(0, 1, below=True)] = 0.95
    eps: Annotated[float, real(SMALLEST, 1e6)] = 1e-8
    weight_decay: Annotated[float, real(0, 1e6)] = 0.1
    clip_norm: Annotated[float, real(0, LARGEST, note="0 for no limit")] = 1.0
    router_bias_rate: Annotated[float, real(0, 1e6)] = 0.001


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
    """Limits of the sections of a run, in seconds; 0 for any time.

    A section that takes longer ends the run, to be started again. Steps have a limit of
    their own, `watchdog_seconds`.

    Attributes:
      start: reading the data, lowering, and restoring the checkpoint.
      first_step: compiling and running the first step.
      evaluation: an evaluation; the first one compiles.
      save: starting a checkpoint, after the one before it is complete.
      end: completing the last checkpoint, the plot and the sample.
    """

    start: Annotated[float, _LIMIT] = 3600.0
    first_step: Annotated[float, _LIMIT] = 7200.0
    evaluation: Annotated[float, _LIMIT] = 3600.0
    save: Annotated[float, _LIMIT] = 1800.0
    end: Annotated[float, _LIMIT] = 3600.0


@dataclasses.dataclass(frozen=True)
class Config:
    """The whole configuration of a run.

    Attributes:
      recipe: name of the recipe that made it.
      framework: "nnx" or "linen".
      model: the decoder; vocab=0 takes the vocabulary of the data.
      optimizer: the optimizer.
      optimizer_mode: "synchronous", "local_sgd" with replica=R, or "islands".
      local_sgd: how replicas are synchronized under optimizer_mode="local_sgd".
      islands: how islands train under optimizer_mode="islands".
      data: the data.
      layout: layout, such as "data=2,fsdp=2,tensor=2"; empty mixes these axes over all
        devices, and "auto" takes the planner's best.
      lowering: "shard_map", "jit", or "auto" for the better of the two as compiled;
        empty for shard_map where the model supports it, else jit.
      compute_dtype: "float32" or "bfloat16"; master weights are float32.
      batch_size: sequences per step, over all devices.
      steps: training steps.
      seed: seed of initialization, dropout and shuffling.
      evaluate_every: steps between evaluations.
      evaluation_batches: batches per evaluation.
      checkpoint_every: steps between checkpoints.
      keep_checkpoints: number of checkpoints to keep.
      checkpoint_local_dir: folder on a disk of each machine where each process also
        keeps its own shards; empty for none.
      checkpoint_local_every: steps between local checkpoints; 0 for
        `checkpoint_every`.
      sample_tokens: length of the sample printed at the end.
      watchdog_seconds: a run of several processes ends, to be started again, when no
        step finishes for this long and for 20 times the median step; 0 for never.
      watchdog: limits of the other sections of a run.
      workdir: folder of metrics, checkpoints and plot; empty for runs/RECIPE.
    """

    recipe: Annotated[str, Text(200)]
    framework: Annotated[str, Choice(("nnx", "linen"))] = "nnx"
    model: DecoderConfig = DecoderConfig(vocab=0)
    optimizer: OptimizerConfig = OptimizerConfig()
    optimizer_mode: Annotated[str, Choice(tuple(MODES))] = SYNCHRONOUS
    local_sgd: LocalSGDConfig = LocalSGDConfig()
    islands: IslandsConfig = IslandsConfig()
    data: DataConfig = DataConfig()
    layout: Annotated[str, Text(LONGEST)] = ""
    lowering: Annotated[str, Choice(("", "auto", *LOWERINGS))] = ""
    compute_dtype: Annotated[str, Choice(("float32", "bfloat16"))] = "float32"
    batch_size: Annotated[int, Number(1, 2**24, "sequences")] = 32
    steps: Annotated[int, Number(1, MAX_STEPS, "steps")] = 200
    seed: Annotated[int, Number(0, 2**32 - 1)] = 0
    evaluate_every: Annotated[int, Number(1, 10**9, "steps")] = 50
    evaluation_batches: Annotated[int, Number(1, 10**6, "batches")] = 4
    checkpoint_every: Annotated[int, Number(1, 10**9, "steps")] = 50
    keep_checkpoints: Annotated[int, Number(1, 10**6, "checkpoints")] = 2
    checkpoint_local_dir: Annotated[str, Path()] = ""
    checkpoint_local_every: Annotated[int, _LOCAL] = 0
    sample_tokens: Annotated[int, Number(0, 2**20, "tokens", "0 for no sample")] = 200
    watchdog_seconds: Annotated[float, _LIMIT] = 300.0
    watchdog: WatchdogConfig = WatchdogConfig()
    workdir: Annotated[str, Path()] = ""

    def __post_init__(self):
        for key, value in values_of(self):
            check_setting(key, value)


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
    for field in dataclasses.fields(kind):
        name, default = field.name, getattr(defaults, field.name, None)
        if dataclasses.is_dataclass(default):
            yield from _settings_in(type(default), default, f"{prefix}{name}.")
        else:
            setting = Setting(default, ranges(kind)[name], helps(kind)[name])
            yield f"{prefix}{name}", setting


SETTINGS: dict[str, Setting] = dict(_settings_in(Config, Config))
"""{key of `--set`: what its field says}."""


def check_setting(key: str, value: Any, text: str | None = None) -> None:
    """Raises ConfigError, with the remedy, for a value outside of its range.

    Bounds are generous: they refuse what no run can mean or no machine can hold.

    Args:
      key: a key of `SETTINGS`.
      value: the value, of any type.
      text: the value as it was written, for the message; Python's by default.
    """
    if problem := SETTINGS[key].range.problem(value):
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


FORMER_NAMES: dict[tuple[type, str], str] = {
    (DecoderConfig, "loss_chunk"): "loss_block",
}
"""{(dataclass, former name of a field): its name}, for old commands and checkpoints."""


def _field_name(kind: type, name: str) -> str:
    return FORMER_NAMES.get((kind, name), name)


def from_dict(values: Any, kind: type = Config, prefix: str = "") -> Any:
    """Makes a configuration from the dict that a checkpoint stores.

    It inverts `dataclasses.asdict`, and accepts former names of fields.

    Args:
      values: {field: value}; dicts for fields that are dataclasses.
      kind: the dataclass to make.
      prefix: of its keys in `SETTINGS`.

    Raises:
      ConfigError: keys that this version does not have, or values out of range.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"the checkpoint's configuration is not a table of fields but "
            f"{shown(repr(values))}; use a checkpoint that experiments.run wrote"
        )
    kinds, fields = typing.get_type_hints(kind), {}
    for key, value in values.items():
        name = _field_name(kind, key)
        if name not in kinds:
            raise ConfigError(
                f"the checkpoint's configuration has {name!r}, which this version does "
                f"not know ({nearest(name, kinds)})"
            )
        if dataclasses.is_dataclass(kinds[name]):
            value = from_dict(value, kinds[name], f"{prefix}{name}.")
        else:
            check_setting(f"{prefix}{name}", value)
        fields[name] = value
    try:
        return kind(**fields)
    except MeshparError:
        raise
    except (TypeError, ValueError) as error:  # Missing fields, or fields that clash.
        raise ConfigError(
            f"the checkpoint's configuration: {error}; use a checkpoint that "
            "experiments.run wrote"
        ) from error


def _parse_value(text: str, kind: type) -> Any:
    """The value of a text; the text itself if it is of another type."""
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return kind(text)
    except ValueError:
        return text


def _set(config: Any, key: str, path: Sequence[str], text: str, group: str = "") -> Any:
    """Sets the value at `path` in `group`; `key` is the whole key, for messages."""
    kinds = typing.get_type_hints(type(config))
    name, *rest = path
    name = _field_name(type(config), name)
    if name not in kinds:
        known = nearest(name, kinds)
        raise ConfigError(f"--set {shown(key)}: no key {shown(name)!r} ({known})")
    value = getattr(config, name)
    if dataclasses.is_dataclass(value):
        if not rest:
            inner = ", ".join(f"{name}.{f.name}" for f in dataclasses.fields(value))
            raise ConfigError(f"--set {key}: set one of {inner}")
        new = _set(value, key, rest, text, f"{group}{name}.")
    elif rest:
        raise ConfigError(
            f"--set {shown(key)}: {name} has no parts; write {group}{name}=VALUE"
        )
    else:
        new = _parse_value(text, kinds[name])
        check_setting(f"{group}{name}", new, text)
    try:
        return dataclasses.replace(config, **{name: new})
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"--set {key}={text}: {error}") from error


def with_settings(config: Config, settings: Sequence[str]) -> Config:
    """Applies `KEY=VALUE` settings such as "model.depth=4", in order.

    Raises:
      ConfigError: a key that does not exist, or a value of the wrong type or out of
        range.
    """
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {shown(setting)}: write KEY=VALUE")
        config = _set(config, key, key.strip().split("."), text.strip())
    return config


def with_mode(config: Config, mode: str) -> Config:
    """The configuration under an optimizer mode, with default settings of all modes."""
    fields = [name for name in MODES if hasattr(config, name)]
    defaults = {name: type(getattr(config, name))() for name in fields}
    return dataclasses.replace(config, optimizer_mode=mode, **defaults)
