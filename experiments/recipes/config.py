"""Configuration of a run: frozen dataclasses, and typed settings of single values.

`--set model.depth=4` changes one value. A key that does not exist is an error that
names the nearest key.
"""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.data import DataConfig
from experiments.models.decoder_config import DecoderConfig
from experiments.recipes import allowed
from experiments.recipes.errors import ConfigError
from experiments.recipes.modes import MODES, SYNCHRONOUS, IslandsConfig, LocalSGDConfig
from meshpar.errors import MeshparError, nearest, shown

AUTO = "auto"
"""The layout that the planner chooses."""


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

    learning_rate: float = 4e-3
    warmup_steps: int = 20
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    router_bias_rate: float = 0.001


@dataclasses.dataclass(frozen=True)
class WatchdogConfig:
    """How long the sections of a run may take, in seconds; 0 for any time.

    A section that takes longer ends the run, to be started again. Steps have a limit of
    their own, `watchdog_seconds`.

    Attributes:
      start: reading the data, lowering, and restoring the checkpoint.
      first_step: compiling and running the first step.
      evaluation: an evaluation; the first one compiles.
      save: starting a checkpoint, after the one before it is complete.
      end: completing the last checkpoint, the plot and the sample.
    """

    start: float = 3600.0
    first_step: float = 7200.0
    evaluation: float = 3600.0
    save: float = 1800.0
    end: float = 3600.0


@dataclasses.dataclass(frozen=True)
class Config:
    """The whole configuration of a run.

    Attributes:
      recipe: name of the recipe that made it.
      framework: "nnx" or "linen".
      model: the decoder; vocab=0 takes the vocabulary of the data.
      optimizer: the optimizer.
      optimizer_mode: "synchronous", "local_sgd" for layouts with replica=R, or
        "islands".
      local_sgd: how replicas are synchronized under optimizer_mode="local_sgd".
      islands: how islands train under optimizer_mode="islands".
      data: the data.
      layout: layout string; empty mixes data, fsdp and tensor over all devices, and
        `AUTO` takes the planner's best.
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
      workdir: folder of metrics, checkpoints and plot.
    """

    recipe: str
    framework: str = "nnx"
    model: DecoderConfig = DecoderConfig(vocab=0)
    optimizer: OptimizerConfig = OptimizerConfig()
    optimizer_mode: str = SYNCHRONOUS
    local_sgd: LocalSGDConfig = LocalSGDConfig()
    islands: IslandsConfig = IslandsConfig()
    data: DataConfig = DataConfig()
    layout: str = ""
    lowering: str = ""
    compute_dtype: str = "float32"
    batch_size: int = 32
    steps: int = 200
    seed: int = 0
    evaluate_every: int = 50
    evaluation_batches: int = 4
    checkpoint_every: int = 50
    keep_checkpoints: int = 2
    checkpoint_local_dir: str = ""
    checkpoint_local_every: int = 0
    sample_tokens: int = 200
    watchdog_seconds: float = 300.0
    watchdog: WatchdogConfig = WatchdogConfig()
    workdir: str = ""

    def __post_init__(self):
        allowed.check_all(self)


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
      prefix: of its keys in `allowed.RANGES`.

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
            allowed.check(f"{prefix}{name}", value)
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
        allowed.check(f"{group}{name}", new, text)
    try:
        return dataclasses.replace(config, **{name: new})
    except MeshparError:
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
