"""The programs and plans of a run: its configuration and what it trains, lowered."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshpar.compose import lower
from meshpar.errors import ConfigError, shown
from meshpar.layouts.grammar import write_items
from meshpar.layouts.layout import Layout
from meshpar.layouts.rules import as_axes, as_rules
from meshpar.lowering.mode import Mode
from meshpar.lowering.shard_map import ShardMapLowering
from meshpar.lowering.train_program import TrainProgram
from meshpar.planner import Plans, plan
from meshpar.runs.config import RunConfig
from meshpar.runs.modes import ISLANDS, LOCAL_SGD, MODES
from meshpar.runs.run import Run


def compute_dtype(config: RunConfig) -> Any:
    """The dtype of the computation; None for the dtype of the weights."""
    return jnp.bfloat16 if config.compute_dtype == "bfloat16" else None


def make_mode(config: RunConfig) -> Mode | None:
    """The mode of replicas or islands; None in synchronous training.

    Raises:
      ConfigError: settings that do not exist, or settings of a mode that is not used.
    """
    mode = config.optimizer_mode
    for name in MODES:
        settings = getattr(config, name, None)
        if name == mode or settings is None:
            continue
        for field in dataclasses.fields(settings):
            value = getattr(settings, field.name)
            if value != field.default:
                raise ConfigError(
                    f"{name}.{field.name}={shown(str(value))}: {mode} training does "
                    f"not use it; leave it out, or add --optimizer_mode={name}"
                )
    return MODES[mode](getattr(config, mode, None))


def num_islands(config: RunConfig) -> int:
    """Islands in this process, each of which needs the devices of the layout."""
    settings = config.islands
    here = config.optimizer_mode == ISLANDS and settings.host == "threads"
    return settings.workers if here else 1


def make_program(
    config: RunConfig,
    run: Run,
    layout: Layout,
    devices: Sequence[jax.Device],
    batch: Any = None,
    optimizer: optax.GradientTransformation | optax.MultiSteps | None = None,
) -> TrainProgram:
    """Lowers a run under a layout.

    Args:
      config: its settings.
      run: what it trains, as `RunConfig.prepared` gives it.
      layout: the layout.
      devices: as many devices as the layout fills.
      batch: shapes of the batch over all processes; by default those of the data.
      optimizer: in place of the run's.

    Raises:
      MeshparError: a model, layout or mode that do not fit.
    """
    mode = make_mode(config)
    with config.blaming_recipe():
        if batch is None:
            batch = run.data.abstract_batch(config.batch_size)
        return lower(
            run.model,
            run.optimizer if optimizer is None else optimizer,
            layout,
            batch,
            devices=devices,
            clip_norm=run.clip_norm,
            compute_dtype=compute_dtype(config),
            lowering=config.lowering,
            mode=mode,
            axis_names=run.axis_names,
        )


def make_plans(
    config: RunConfig, run: Run, devices: Sequence[jax.Device], **options: Any
) -> Plans:
    """Plans a run on devices.

    Args:
      config: its settings.
      run: what it trains, as `RunConfig.prepared` gives it.
      devices: the devices to fill.
      **options: as in `meshpar.plan`.

    Raises:
      MeshparError: nothing fits, or a mode or lowering whose cost is not predicted.
    """
    if config.optimizer_mode == LOCAL_SGD:
        raise ConfigError(
            "--optimizer_mode=local_sgd: the planner predicts synchronous training; "
            "give a --layout with replica=R"
        )
    if config.lowering not in ("", ShardMapLowering.name):
        raise ConfigError(
            f"--lowering={config.lowering}: the planner predicts shard_map programs; "
            "leave it out"
        )
    make_mode(config)  # Settings that no mode reads are refused.
    options["compute_dtype"] = compute_dtype(config)
    names = write_items({"axes": as_rules(as_axes(run.axis_names))})
    wanted = filter(None, (options.get("require", ""), names))
    options["require"] = ",".join(wanted)
    with config.blaming_recipe():
        batch = run.data.abstract_batch(config.batch_size)
        return plan(run.model, run.optimizer, batch, devices, **options)
