"""A decoder in NNX after Bonsai's Qwen3: caches of layers, shardings of its own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

import meshpar

VOCAB, EMBED, MLP, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 16, 32, 4, 2, 8, 4


@dataclasses.dataclass(frozen=True)
class ShardConfig:
    emb_vd: P = P("tp", "fsdp")
    q_weight_ndh: P = P("tp", "fsdp", None)
    o_weight_nhd: P = P("tp", None, "fsdp")
    ffw_weight_df: P = P("fsdp", "tp")
    ffw_weight_fd: P = P("tp", "fsdp")
    rms_norm: P = P("tp")
    act_btd: P = P("fsdp", None, None)
    act_btf: P = P("fsdp", None, "tp")
    act_btnh: P = P("fsdp", None, "tp", None)


SHARD = ShardConfig()


def shard(x, spec):
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and len(mesh.axis_names) > 0:
        return reshard(x, spec)
    return x


class LayerCache(nnx.Module):
    def __init__(self, batch_size, size):
        shape = batch_size, size, KV_HEADS, HEAD_DIM
        self.k_cache = nnx.Cache(jnp.zeros(shape))
        self.v_cache = nnx.Cache(jnp.zeros(shape))
        self.cur_ind = nnx.Variable(jnp.zeros((), jnp.int32))


class RMSNorm(nnx.Module):
    def __init__(self, dim, *, rngs):
        init = nnx.with_partitioning(nnx.initializers.ones_init(), SHARD.rms_norm)
        self.scale = nnx.Param(init(rngs.params(), (dim,)))

    def __call__(self, x):
        rms = jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
        return self.scale[...] * x / rms


def einsum(text, shape, spec, rngs):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), spec)
    return nnx.Einsum(text, shape, kernel_init=init, rngs=rngs)


def apply_rope(x, sin, cos):
    x1, x2 = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]
    sin, cos = sin[:, :, None, :], cos[:, :, None, :]
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, *, rngs):
        query, key = (HEADS, EMBED, HEAD_DIM), (KV_HEADS, EMBED, HEAD_DIM)
        self.q_proj = einsum("BTD,NDH->BTNH", query, SHARD.q_weight_ndh, rngs)
        self.k_proj = einsum("BSD,KDH->BSKH", key, SHARD.q_weight_ndh, rngs)
        self.v_proj = einsum("BSD,KDH->BSKH", key, SHARD.q_weight_ndh, rngs)
        self.o_proj = einsum(
            "BTNH,NHD->BTD", (HEADS, HEAD_DIM, EMBED), SHARD.o_weight_nhd, rngs
        )
        self.q_norm = RMSNorm(HEAD_DIM, rngs=rngs)
        self.k_norm = RMSNorm(HEAD_DIM, rngs=rngs)

    def __call__(self, x, cache, segment_ids):
        query = shard(self.q_norm(self.q_proj(x)), SHARD.act_btnh)
        key = shard(self.k_norm(self.k_proj(x)), SHARD.act_btnh)
        value = shard(self.v_proj(x), SHARD.act_btnh)
        start = 0 if cache is None else cache.cur_ind.get_value()
        positions = start + jnp.cumsum(segment_ids, axis=-1) - 1
        fraction = 10_000 ** (2 * jnp.arange(HEAD_DIM // 2) / HEAD_DIM)
        angles = positions[..., None] / fraction
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        query, key = apply_rope(query, sin, cos), apply_rope(key, sin, cos)
        if cache is not None:
            place = 0, start, 0, 0
            update = jax.lax.dynamic_update_slice
            cache.k_cache.set_value(update(cache.k_cache.get_value(), key, place))
            cache.v_cache.set_value(update(cache.v_cache.get_value(), value, place))
            cache.cur_ind.set_value(start + x.shape[1])
            key, value = cache.k_cache.get_value(), cache.v_cache.get_value()
        b, t, n, h = query.shape
        query = query.reshape(b, t, KV_HEADS, n // KV_HEADS, h)
        logits = jnp.einsum("BTKGH,BSKH->BTSKG", query, key) * h**-0.5
        causal = jnp.arange(key.shape[1])[None] <= start + jnp.arange(t)[:, None]
        logits = jnp.where(causal[None, :, :, None, None], logits, -1e30)
        weights = jax.nn.softmax(logits, axis=2)
        encoded = jnp.einsum("BTSKG,BSKH->BTKGH", weights, value).reshape(b, t, n, h)
        return shard(self.o_proj(encoded), SHARD.act_btd)


class Mlp(nnx.Module):
    def __init__(self, *, rngs):
        def linear(sizes, spec):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), spec)
            return nnx.Linear(*sizes, use_bias=False, kernel_init=init, rngs=rngs)

        self.gate_proj = linear((EMBED, MLP), SHARD.ffw_weight_df)
        self.up_proj = linear((EMBED, MLP), SHARD.ffw_weight_df)
        self.down_proj = linear((MLP, EMBED), SHARD.ffw_weight_fd)

    def __call__(self, x):
        activations = nnx.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(shard(activations, SHARD.act_btf))


class DecoderLayer(nnx.Module):
    def __init__(self, *, rngs):
        self.input_layernorm = RMSNorm(EMBED, rngs=rngs)
        self.attn = Attention(rngs=rngs)
        self.post_attention_layernorm = RMSNorm(EMBED, rngs=rngs)
        self.mlp = Mlp(rngs=rngs)

    def __call__(self, x, cache, segment_ids):
        x = x + self.attn(self.input_layernorm(x), cache, segment_ids)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3(nnx.Module):
    def __init__(self, *, rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(0.5), SHARD.emb_vd)
        self.embedder = nnx.Embed(VOCAB, EMBED, embedding_init=init, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(rngs=rngs) for _ in range(LAYERS)])
        self.final_norm = RMSNorm(EMBED, rngs=rngs)
        self.lm_head = einsum("BTD,DV->BTV", (EMBED, VOCAB), P("fsdp", "tp"), rngs)

    def init_cache(self, batch_size, size):
        return [LayerCache(batch_size, size) for _ in range(LAYERS)]

    def __call__(self, tokens, segment_ids, cache=None):
        x = self.embedder.embedding.get_value().at[(tokens,)].get()
        x = shard(x, SHARD.act_btd)
        for i, layer in enumerate(self.layers):
            x = layer(x, cache[i] if cache else None, segment_ids)
        return self.lm_head(self.final_norm(x))


def loss_fn(model, batch):
    """The loss of a forward pass that fills the caches, as prefill does."""
    tokens, segment_ids = batch["tokens"], batch["segment_ids"]
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = model(inputs, segment_ids[:, :-1], model.init_cache(*inputs.shape))
    weights = segment_ids[:, 1:].astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return meshpar.metrics.Mean((losses * weights).sum(), weights.sum())


def make_batch(seed, batch_size, length=8):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, VOCAB, (batch_size, length))
    ends = rng.integers(3, length + 1, (batch_size, 1))
    segments = (np.arange(length)[None] < ends).astype(np.int32)
    return {"tokens": tokens * segments, "segment_ids": segments}
