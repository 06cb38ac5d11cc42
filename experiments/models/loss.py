"""Next-token cross-entropy: vocabulary-parallel, and in blocks to save memory."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

import meshpar
from experiments.models.decoder_config import DecoderConfig
from meshpar import layouts, vocabulary
from meshpar.arrays import Array
from meshpar.ops.experts import DEVICE_LOAD, Statistics
from meshpar.rows.opaque import split_as_arguments


def logits(x_BLD: Array, w_DV: Array) -> Array:
    """The head: logits_BLV, split over the devices that hold the vocabulary."""
    logits_BLV = jnp.einsum("BLD,DV->BLV", x_BLD, w_DV)
    return layouts.constrain(logits_BLV, "batch", "length", "vocab")


def cross_entropy(
    logits_BLV: Array, targets_BL: Array, weights_BL: Array | None = None
) -> Array:
    """Mean negative log-likelihood of the targets, in nats per token, float32.

    Args:
      logits_BLV: output of the head.
      targets_BL: token ids.
      weights_BL: weight of every token, 0 for padding; all count the same without.
    """
    losses_BL = vocabulary.token_losses(logits_BLV, targets_BL)
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
    mean = jax.tree.map(lambda x: x / config.depth, statistics)
    metrics = {"experts_dropped": mean.dropped, "experts_overflow": mean.overflow}
    if not training:  # Microbatches, in which a pipeline evaluates, change the others.
        return loss, metrics
    loss += config.balance_loss * mean.balance + config.z_loss * mean.z
    loss += statistics.bias  # 0, with the loads as its gradient.
    return loss, {
        **metrics,
        "experts_balance": mean.balance,
        "experts_load": meshpar.Max(statistics.load),
        DEVICE_LOAD: meshpar.Max(statistics.device_load),
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


def blockwise_cross_entropy(
    x_BLD: Array,
    w_DV: Array,
    targets_BL: Array,
    block: int,
    weights_BL: Array | None = None,
) -> Array:
    """Applies head and `cross_entropy` to `block` tokens of each sequence at a time.

    Memory holds the logits of one block, [B, block, V], instead of [B, L, V]. The
    backward pass computes them again.

    Args:
      x_BLD: input of the head.
      w_DV: the head; its gradient is summed over the blocks in float32.
      targets_BL: token ids.
      block: most tokens per block; fewer where it does not divide L.
      weights_BL: as in `cross_entropy`.

    Returns:
      The mean loss in nats per token, a float32 scalar.
    """
    # A device may hold a part of each sequence.
    block = math.gcd(block, x_BLD.shape[1])
    # Gather w along D before the loop: inside it, every block would gather it again.
    w_DV = layouts.constrain(w_DV, None, "vocab").astype(jnp.float32)
    losses = functools.partial(_blockwise_losses, block=block)
    losses_BL = split_as_arguments(losses, x_BLD, w_DV, targets_BL)
    if weights_BL is None:
        return jnp.mean(losses_BL)
    return jnp.sum(weights_BL * losses_BL) / jnp.sum(weights_BL)


def _blockwise_losses(
    x_BLD: Array, w_DV: Array, targets_BL: Array, block: int
) -> Array:
    """The loss of every token, float32 [B, L]."""

    def split(x_BL: Array) -> Array:
        blocks = x_BL.reshape(x_BL.shape[0], -1, block, *x_BL.shape[2:])
        return blocks.swapaxes(0, 1)

    @jax.checkpoint
    def block_losses(_: None, inputs: tuple[Array, Array]) -> tuple[None, Array]:
        x_BCD, targets_BC = inputs
        logits_BCV = logits(x_BCD, w_DV.astype(x_BCD.dtype))
        return None, vocabulary.token_losses(logits_BCV, targets_BC)

    _, losses = jax.lax.scan(block_losses, None, (split(x_BLD), split(targets_BL)))
    return losses.swapaxes(0, 1).reshape(targets_BL.shape)
