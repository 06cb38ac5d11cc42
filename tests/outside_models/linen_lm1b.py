"""A decoder in Linen after Flax's lm1b example: packed examples, logical names."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

import meshpar


@struct.dataclass
class TransformerConfig:
    vocab_size: int = 32
    logits_via_embedding: bool = False
    dtype: Any = jnp.float32
    emb_dim: int = 16
    num_heads: int = 2
    num_layers: int = 4
    qkv_dim: int = 16
    mlp_dim: int = 32
    max_len: int = 12
    deterministic: bool = True
    kernel_init: Any = nn.initializers.xavier_uniform()
    bias_init: Any = nn.initializers.normal(stddev=1e-6)


def partitioned(init, *names):
    return nn.with_logical_partitioning(init, names)


class MlpBlock(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs):
        cfg = self.config
        x = nn.Dense(
            cfg.mlp_dim,
            kernel_init=partitioned(cfg.kernel_init, "embed", "mlp"),
            bias_init=partitioned(cfg.bias_init, "mlp"),
        )(inputs)
        x = nn.relu(x)
        x = nn.with_logical_constraint(x, ("batch", "length", "mlp"))
        return nn.Dense(
            inputs.shape[-1],
            kernel_init=partitioned(cfg.kernel_init, "mlp", "embed"),
            bias_init=partitioned(cfg.bias_init, "embed"),
        )(x)


class EncoderDecoder1DBlock(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs, decoder_mask):
        cfg = self.config
        norm = dict(
            scale_init=partitioned(nn.initializers.ones, "embed"),
            bias_init=partitioned(nn.initializers.zeros, "embed"),
        )
        x = nn.LayerNorm(**norm)(inputs)
        x = nn.MultiHeadDotProductAttention(
            num_heads=cfg.num_heads,
            qkv_features=cfg.qkv_dim,
            kernel_init=partitioned(cfg.kernel_init, "embed", "heads", "kv"),
            out_kernel_init=partitioned(cfg.kernel_init, "heads", "kv", "embed"),
            use_bias=False,
            deterministic=cfg.deterministic,
        )(x, mask=decoder_mask)
        x = x + inputs
        return x + MlpBlock(cfg)(nn.LayerNorm(**norm)(x))


class TransformerLM(nn.Module):
    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs, inputs_positions, inputs_segmentation):
        cfg = self.config
        decoder_mask = nn.combine_masks(
            nn.make_attention_mask(inputs > 0, inputs > 0),
            nn.make_causal_mask(inputs),
            nn.make_attention_mask(inputs_segmentation, inputs_segmentation, jnp.equal),
        )
        shifted = jnp.pad(inputs, ((0, 0), (1, 0)))[:, :-1]
        embed = nn.Embed(
            cfg.vocab_size,
            cfg.emb_dim,
            embedding_init=partitioned(nn.initializers.normal(1.0), "vocab", "embed"),
        )
        y = embed(shifted)
        pos_embedding = self.param(
            "pos_embedding",
            partitioned(nn.initializers.normal(0.02), None, "embed"),
            (cfg.max_len, cfg.emb_dim),
        )
        y = y + jnp.take(pos_embedding, inputs_positions, axis=0)
        for lyr in range(cfg.num_layers):
            y = EncoderDecoder1DBlock(cfg, name=f"block_{lyr}")(y, decoder_mask)
        y = nn.LayerNorm(use_bias=False, use_scale=False)(y)
        if cfg.logits_via_embedding:
            return embed.attend(y) / jnp.sqrt(y.shape[-1])
        return nn.Dense(
            cfg.vocab_size,
            kernel_init=partitioned(cfg.kernel_init, "embed", "vocab"),
            use_bias=False,
        )(y)


def loss_fn(apply_fn, batch):
    """Label-smoothed cross-entropy per token that is no padding."""
    logits = apply_fn(
        batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"]
    )
    weights = jnp.where(batch["targets"] > 0, 1.0, 0.0)
    soft = optax.smooth_labels(jax.nn.one_hot(batch["targets"], logits.shape[-1]), 0.1)
    loss = -jnp.sum(soft * nn.log_softmax(logits), axis=-1) * weights
    return meshpar.metrics.Mean(loss.sum(), weights.sum())


def make_batch(seed, batch_size, length=12, vocab=32):
    """Two examples packed into every row, and padding at its end."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(1, vocab, (batch_size, length))
    first = rng.integers(2, 6, (batch_size, 1))
    end = rng.integers(7, length + 1, (batch_size, 1))
    column = np.arange(length)[None]
    inputs = np.where(column < end, inputs, 0)
    segmentation = np.where(column < first, 1, 2) * (column < end)
    position = np.where(column < first, column, column - first) * (column < end)
    return {
        "inputs": inputs,
        "targets": inputs,
        "inputs_position": position,
        "inputs_segmentation": segmentation,
    }
