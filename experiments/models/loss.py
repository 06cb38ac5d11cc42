"""Next-token cross-entropy: vocabulary-parallel, and in blocks to save memory."""

from typing import Any

import jax
import jax.numpy as jnp

import meshpar
from experiments.models.decoder_config import DecoderConfig
from meshpar.arrays import Array
from meshpar.ops import vocabulary
from meshpar.ops.experts import DEVICE_LOAD, Statistics


def cross_entropy(
    logits_BLV: Array, targets_BL: Array, weights_BL: Array | None = None
) -> Array:
    """Mean negative log-likelihood of the targets, in nats per token, float32.

    Args:
      logits_BLV: output of the head.
      targets_BL: token ids.
      weights_BL: weight of every token, 0 for padding; all count the same without.
    """
    return mean(vocabulary.token_losses(logits_BLV, targets_BL), weights_BL)


def mean(losses_BL: Array, weights_BL: Array | None = None) -> Array:
    """The mean of the losses of all tokens, each by its weight."""
    if weights_BL is None:
        return jnp.mean(losses_BL)
    return jnp.sum(weights_BL * losses_BL) / jnp.sum(weights_BL)


def with_experts(
    loss: Array, statistics: Statistics, config: DecoderConfig, training: bool
) -> tuple[Array, dict[str, Any]]:
    """(the loss with the auxiliary losses of its mixtures of experts, their metrics).

    Args:
      loss: cross-entropy.
      statistics: of all layers.
      config: weighs the auxiliary losses.
      training: whether to add them; evaluation reports cross-entropy alone.
    """
    means = jax.tree.map(lambda x: x / config.depth, statistics)
    metrics = {"experts_dropped": means.dropped, "experts_overflow": means.overflow}
    if not training:  # Microbatches, in which a pipeline evaluates, change the others.
        return loss, metrics
    loss += config.balance_loss * means.balance + config.z_loss * means.z
    loss += statistics.bias  # 0, with the loads as its gradient.
    return loss, {
        **metrics,
        "experts_balance": means.balance,
        "experts_load": meshpar.metrics.Max(statistics.load),
        DEVICE_LOAD: meshpar.metrics.Max(statistics.device_load),
    }


def with_weight(
    loss: Array, batch: dict[str, Array], metrics: dict[str, Any] | None = None
) -> Any:
    """The loss with its metrics: its weight is one if tokens of the batch have weights.

    Args:
      loss: the mean over the tokens.
      batch: holds "weights", or not.
      metrics: others, if there are any.
    """
    if "weights" in batch:
        metrics = {**(metrics or {}), "weight": jnp.sum(batch["weights"])}
    return loss if metrics is None else (loss, metrics)
