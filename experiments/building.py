"""From a configuration to a lowered program: model, optimizer, data, devices."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

import meshpar
from experiments import data
from experiments.config import Config, ConfigError, LocalSGDConfig, OptimizerConfig
from experiments.models.decoder import language_model
from experiments.models.linen_decoder import LinenDecoder, check_kind
from experiments.models.loss import cross_entropy
from meshpar.errors import nearest


def fit_vocabulary(config: Config, corpus: data.Corpus) -> Config:
    """Takes the vocabulary of the data where the recipe leaves it open.

    Raises:
      ConfigError: the recipe's vocabulary is too small for the data.
    """
    model = config.model
    if model.vocab == 0:
        model = dataclasses.replace(model, vocab=corpus.vocab)
        return dataclasses.replace(config, model=model)
    highest = max(len(corpus.train_counts), len(corpus.held_out_counts)) - 1
    if highest >= model.vocab:
        raise ConfigError(
            f"model.vocab={model.vocab}, but the data holds token id {highest}; use "
            "model.vocab=0 to take the vocabulary of the data"
        )
    return config


def identity(config: Config, corpus: data.Corpus) -> dict[str, str | int]:
    """What must stay the same for a checkpoint to be of the same run."""
    return {
        "data": corpus.fingerprint,
        "length": config.model.length,
        "seed": config.seed,
    }


def make_model(config: Config) -> meshpar.Model:
    """The recipe's model with next-token cross-entropy."""
    decoder = config.model
    if config.framework == "linen":
        check_kind(decoder)
        tokens = jax.ShapeDtypeStruct((1, decoder.length), jnp.int32)
        return meshpar.from_linen(
            LinenDecoder(decoder),
            lambda apply, batch: cross_entropy(
                apply(batch["tokens"], train=True), batch["targets"]
            ),
            tokens,
            lambda apply, batch: cross_entropy(
                apply(batch["tokens"]), batch["targets"]
            ),
        )

    return language_model(decoder)


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
    """AdamW that decays weights of two dims or more, stacking apart."""

    def is_weight(param: meshpar.Param) -> bool:
        stacked = param.names is not None and "layers" in param.names
        return len(param.shape) - stacked >= 2

    return optax.adamw(
        learning_rates(config, steps),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask={path: is_weight(param) for path, param in model.params.items()},
    )


def make_mode(config: Config) -> meshpar.LocalSGD | None:
    """How replicas are synchronized; None in synchronous training.

    Raises:
      ConfigError: an outer optimizer or merge that does not exist, or settings that
        nothing would use.
    """
    local = config.local_sgd
    if config.optimizer_mode == "synchronous":
        if local != LocalSGDConfig():
            raise ConfigError(
                "local_sgd.* is set, and synchronous training does not use it; add "
                "--optimizer_mode=local_sgd"
            )
        return None
    rate, momentum = local.outer_learning_rate, local.outer_momentum
    outer = {
        "average": lambda: None,
        "sgd": lambda: optax.sgd(rate, momentum or None),
        "nesterov": lambda: optax.sgd(rate, momentum, nesterov=True),
    }
    merge = {
        "shift": meshpar.Shift,
        "overwrite": meshpar.Overwrite,
        "lerp": lambda: meshpar.Lerp(local.merge_weight),
        "elastic": lambda: meshpar.Elastic(local.merge_weight),
    }
    for name, known in (("outer", outer), ("merge", merge)):
        if (value := getattr(local, name)) not in known:
            raise ConfigError(f"local_sgd.{name}={value!r} ({nearest(value, known)})")
    period = local.period
    if local.warmup_steps:
        period = meshpar.warm_up(local.warmup_steps, period)
    return meshpar.LocalSGD(
        period=period,
        staleness=local.staleness,
        fragments=local.fragments,
        outer=outer[local.outer](),
        merge=merge[local.merge](),
        wire=local.wire,
        error_feedback=local.error_feedback,
        gossip=meshpar.Gossip(local.gossip) if local.gossip else None,
        damping=local.damping,
    )


def make_program(
    config: Config, layout: meshpar.Layout, devices: Sequence[jax.Device]
) -> meshpar.TrainProgram:
    """Lowers a configuration, whose vocabulary is known, under a layout."""
    model = make_model(config)
    shape = (config.batch_size, config.model.length)
    batch = {
        name: jax.ShapeDtypeStruct(shape, np.int32) for name in ("tokens", "targets")
    }
    return meshpar.lower(
        model,
        make_optimizer(config.optimizer, config.steps, model),
        layout,
        batch,
        devices=devices,
        clip_norm=config.optimizer.clip_norm or None,
        compute_dtype=jnp.bfloat16 if config.compute_dtype == "bfloat16" else None,
        lowering=config.lowering,
        mode=make_mode(config),
    )
