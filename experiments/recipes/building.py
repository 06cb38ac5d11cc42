"""Builds a configuration: model, optimizer, optimizer mode and lowered program."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util

import meshpar
from experiments.data import Corpus
from experiments.models import linen_decoder
from experiments.models.language_model import language_model
from experiments.recipes.config import Config, OptimizerConfig
from experiments.recipes.errors import ConfigError
from experiments.recipes.modes import ISLANDS, LOCAL_SGD, MODES
from meshpar.layouts.param import follows_load
from meshpar.lowering.mode import Mode
from meshpar.lowering.shard_map import ShardMapLowering
from meshpar.ops import experts


def fit_vocabulary(config: Config, corpus: Corpus) -> Config:
    """Sets `model.vocab` from the data if the recipe leaves it at 0.

    Raises:
      ConfigError: the recipe's vocabulary is too small for the data.
    """
    model = config.model
    if model.vocab == 0:
        model = dataclasses.replace(model, vocab=corpus.vocab)
        return dataclasses.replace(config, model=model)
    if corpus.highest_id >= model.vocab:
        raise ConfigError(
            f"model.vocab={model.vocab}, but the data holds token id "
            f"{corpus.highest_id}; use "
            "model.vocab=0 to take the vocabulary of the data"
        )
    return config


def identity(config: Config, corpus: Corpus) -> dict[str, str | int]:
    """The values that may not change when a run resumes; stored in checkpoints."""
    return dict(data=corpus.fingerprint, length=config.model.length, seed=config.seed)


def compute_dtype(config: Config) -> Any:
    """The dtype of the computation; None for that of the weights."""
    return jnp.bfloat16 if config.compute_dtype == "bfloat16" else None


def make_model(config: Config) -> meshpar.Model:
    """The recipe's model with next-token cross-entropy.

    Raises:
      MeshparError: framework=linen with a decoder that only NNX supports.
    """
    if config.framework == "linen":
        if config.data.pack:
            raise ConfigError(
                "data.pack=True: the Linen decoder takes no packed documents; use "
                "framework=nnx"
            )
        return linen_decoder.language_model(config.model)
    return language_model(config.model)


def learning_rates(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Linear warm-up, then cosine decay to `final_fraction` at the last step."""
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (config.warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=min(config.warmup_steps, steps),
        decay_steps=max(steps, config.warmup_steps + 1),
        end_value=config.learning_rate * config.final_fraction,
    )


def make_optimizer(
    config: OptimizerConfig, steps: int, model: meshpar.Model
) -> optax.GradientTransformation:
    """AdamW with weight decay for parameters of two dims or more.

    The dim over which layers are stacked does not count. Biases that balance experts
    follow the loads.
    """

    def decays(path: tuple, x: Any) -> bool:
        param = model.params.get("/".join(map(str, path)))
        if param is None:  # One layer of a stack, as the model itself has it.
            return x.ndim >= 2
        stacked = param.names is not None and "layers" in param.names
        return len(param.shape) - stacked >= 2

    optimizer = optax.adamw(
        learning_rates(config, steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=lambda params: traverse_util.path_aware_map(decays, params),
    )
    if not any(follows_load(param.names) for param in model.params.values()):
        return optimizer
    return experts.balanced(optimizer, model, config.router_bias_rate)


def make_mode(config: Config) -> Mode | None:
    """The mode of replicas or islands; None in synchronous training.

    Raises:
      ConfigError: settings that do not exist, or settings of a mode that is not used.
    """
    mode = config.optimizer_mode
    for name in MODES:
        settings = getattr(config, name, None)
        if name != mode and settings is not None and settings != type(settings)():
            raise ConfigError(
                f"{name}.* is set, and {mode} training does not use it; add "
                f"--optimizer_mode={name}"
            )
    return MODES[mode](getattr(config, mode, None))


def num_islands(config: Config) -> int:
    """Islands in this process, each of which needs the devices of the layout."""
    settings = config.islands
    here = config.optimizer_mode == ISLANDS and settings.host == "threads"
    return settings.workers if here else 1


def abstract_batch(
    config: Config, weighted: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """The global batch of a configuration, [batch, length].

    Args:
      config: the run.
      weighted: whether batches hold the weight of every token.
    """
    shape = (config.batch_size, config.model.length)
    names = ["tokens", "targets"]
    if config.data.pack:
        names += ["segments", "positions"]
    batch = {name: jax.ShapeDtypeStruct(shape, np.int32) for name in names}
    if weighted or config.data.pack:
        batch["weights"] = jax.ShapeDtypeStruct(shape, np.float32)
    return batch


def make_plans(
    config: Config, devices: Sequence[jax.Device], **options: Any
) -> meshpar.planner.Plans:
    """Plans a configuration on devices.

    Args:
      config: the run; its vocabulary must be known (`fit_vocabulary`).
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
    model = make_model(config)
    optimizer = make_optimizer(config.optimizer, config.steps, model)
    options["compute_dtype"] = compute_dtype(config)
    return meshpar.plan(model, optimizer, abstract_batch(config), devices, **options)


def make_program(
    config: Config,
    layout: meshpar.Layout,
    devices: Sequence[jax.Device],
    weighted: bool = False,
    optimizer: optax.GradientTransformation | optax.MultiSteps | None = None,
) -> meshpar.TrainProgram:
    """Lowers a configuration under a layout.

    Args:
      config: the run; its vocabulary must be known (`fit_vocabulary`).
      layout: the layout.
      devices: as many devices as the layout fills.
      weighted: whether batches hold the weight of every token.
      optimizer: in place of the configured one.

    Raises:
      MeshparError: a model, layout or mode that do not fit.
    """
    model = make_model(config)
    batch = abstract_batch(config, weighted)
    if optimizer is None:
        optimizer = make_optimizer(config.optimizer, config.steps, model)
    return meshpar.lower(
        model,
        optimizer,
        layout,
        batch,
        devices=devices,
        clip_norm=config.optimizer.clip_norm or None,
        compute_dtype=compute_dtype(config),
        lowering=config.lowering,
        mode=make_mode(config),
    )
