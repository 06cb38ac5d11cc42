"""A decoder in NNX after Flax's gemma example: mesh axes, local and global layers."""

import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshpar

VOCAB, EMBED, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 32, 16, 32, 4, 2, 8
K_MASK = -2.3819763e38
WINDOW = 3


class AttentionType(enum.Enum):
    GLOBAL = 1
    LOCAL_SLIDING = 2


ATTENTION_TYPES = (AttentionType.LOCAL_SLIDING, AttentionType.GLOBAL) * 2


@dataclasses.dataclass(slots=True, frozen=True)
class ShardingConfig:
    emb_vd: P | None = None
    q_weight_ndh: P | None = None
    kv_weight_cndh: P | None = None
    o_weight_nhd: P | None = None
    ffw_weight_df: P | None = None
    ffw_weight_fd: P | None = None
    rms_norm_weight: P | None = None
    act_btd: P | None = None
    act_btf: P | None = None

    @staticmethod
    def fsdp_tp_sharding():
        return ShardingConfig(
            emb_vd=P("tensor", "fsdp"),
            q_weight_ndh=P("tensor", "fsdp", None),
            kv_weight_cndh=P(None, "tensor", "fsdp", None),
            o_weight_nhd=P("tensor", None, "fsdp"),
            ffw_weight_df=P("fsdp", "tensor"),
            ffw_weight_fd=P("tensor", "fsdp"),
            rms_norm_weight=P("tensor"),
        )


class RMSNorm(nnx.Module):
    def __init__(self, dim, *, sharding, rngs):
        init = nnx.with_partitioning(nnx.initializers.zeros_init(), sharding)
        self.scale = nnx.Param(init(rngs.params(), (dim,)))

    def __call__(self, x):
        var = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        scale = jnp.expand_dims(self.scale[...], axis=range(len(x.shape) - 1))
        return x * jax.lax.rsqrt(var + 1e-06) * (1 + scale)


def einsum(text, shape, sharding, rngs):
    metadata = {"out_sharding": sharding}
    return nnx.Einsum(text, shape, kernel_metadata=metadata, rngs=rngs)


def apply_rope(inputs, positions, head_dim):
    fraction = 2 * jnp.arange(0, head_dim // 2) / head_dim
    angles = positions[..., None] / (10_000**fraction)[None, None]
    sin, cos = jnp.sin(angles)[:, :, None], jnp.cos(angles)[:, :, None]
    first, second = jnp.split(inputs, 2, axis=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(parts, axis=-1)


class Attention(nnx.Module):
    def __init__(self, attn_type, shd, *, rngs):
        self.attn_type = attn_type
        self.q_einsum = einsum(
            "BTD,NDH->BTNH", (HEADS, EMBED, HEAD_DIM), shd.q_weight_ndh, rngs
        )
        self.kv_einsum = einsum(
            "BSD,CKDH->CBSKH", (2, KV_HEADS, EMBED, HEAD_DIM), shd.kv_weight_cndh, rngs
        )
        self.attn_vec_einsum = einsum(
            "BTNH,NHD->BTD", (HEADS, HEAD_DIM, EMBED), shd.o_weight_nhd, rngs
        )
        self.shd_config = shd

    def __call__(self, x, positions, mask):
        query = apply_rope(self.q_einsum(x), positions, HEAD_DIM)
        key, value = self.kv_einsum(x)
        key = apply_rope(key, positions, HEAD_DIM)
        batch, length = x.shape[:2]
        query = query.reshape(batch, length, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        logits = jnp.einsum("BTKGH,BSKH->BTKGS", query * HEAD_DIM**-0.5, key)
        logits = jnp.tanh(logits / 50.0) * 50.0
        if self.attn_type == AttentionType.LOCAL_SLIDING:
            mask = mask * jnp.triu(jnp.ones_like(mask), 1 - WINDOW)
        logits = jnp.where(mask[:, :, None, None], logits, K_MASK)
        probs = jax.nn.softmax(logits, axis=-1)
        encoded = jnp.einsum("BTKGS,BSKH->BTKGH", probs, value)
        encoded = encoded.reshape(batch, length, HEADS, HEAD_DIM)
        return self.attn_vec_einsum(encoded, out_sharding=self.shd_config.act_btd)


class FeedForward(nnx.Module):
    def __init__(self, shd, *, rngs):
        def linear(sizes, sharding):
            metadata = {"out_sharding": sharding}
            return nnx.Linear(
                *sizes, use_bias=False, kernel_metadata=metadata, rngs=rngs
            )

        self.gate_proj = linear((EMBED, HIDDEN), shd.ffw_weight_df)
        self.up_proj = linear((EMBED, HIDDEN), shd.ffw_weight_df)
        self.down_proj = linear((HIDDEN, EMBED), shd.ffw_weight_fd)
        self.shd_config = shd

    def __call__(self, x):
        gate = nnx.gelu(self.gate_proj(x, out_sharding=self.shd_config.act_btf))
        up = self.up_proj(x, out_sharding=self.shd_config.act_btf)
        return self.down_proj(gate * up, out_sharding=self.shd_config.act_btd)


class Block(nnx.Module):
    def __init__(self, attn_type, shd, *, rngs):
        norm = dict(sharding=shd.rms_norm_weight, rngs=rngs)
        self.pre_attention_norm = RMSNorm(EMBED, **norm)
        self.attn = Attention(attn_type, shd, rngs=rngs)
        self.pre_ffw_norm = RMSNorm(EMBED, **norm)
        self.mlp = FeedForward(shd, rngs=rngs)

    def __call__(self, x, positions, mask):
        x = x + self.attn(self.pre_attention_norm(x), positions, mask)
        return x + self.mlp(self.pre_ffw_norm(x))


class Transformer(nnx.Module):
    def __init__(self, shd, *, rngs):
        self.embedder = nnx.Embed(
            VOCAB, EMBED, embedding_metadata={"out_sharding": shd.emb_vd}, rngs=rngs
        )
        self.layers = nnx.List([Block(t, shd, rngs=rngs) for t in ATTENTION_TYPES])
        self.final_norm = RMSNorm(EMBED, sharding=shd.rms_norm_weight, rngs=rngs)

    def __call__(self, tokens, positions, mask):
        x = self.embedder(tokens) * jnp.sqrt(EMBED)
        for layer in self.layers:
            x = layer(x, positions, mask)
        logits = self.embedder.attend(self.final_norm(x))
        return jnp.tanh(logits / 30.0) * 30.0


def loss_fn(model, batch):
    """Masked next-token loss as in the example's train.py."""
    inputs, input_mask = batch["inputs"], batch["inputs"] > 0
    positions = jnp.maximum(jnp.cumsum(input_mask, axis=-1) - 1, 0)
    causal = jnp.tril(jnp.ones((inputs.shape[1],) * 2, dtype=bool))
    logits = model(inputs, positions, input_mask[:, None] & causal[None])
    target_mask = input_mask[:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1], inputs[:, 1:]
    )
    return meshpar.metrics.Mean((losses * target_mask).sum(), target_mask.sum())


def make_batch(seed, batch_size, length=8):
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, VOCAB, (batch_size, length))
    ends = rng.integers(3, length + 1, (batch_size, 1))
    return {"inputs": np.where(np.arange(length)[None] < ends, ids, 0)}
