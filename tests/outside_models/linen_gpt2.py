"""GPT-2 in Linen after transformers: Conv1D kernels, tied head, no dim names."""

import functools

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

VOCAB, EMB, HEADS, LAYERS, POSITIONS = 32, 16, 2, 2, 8


class FlaxConv1D(nn.Module):
    features: int

    @nn.compact
    def __call__(self, inputs):
        shape = (self.features, inputs.shape[-1])
        kernel = self.param("kernel", nn.initializers.normal(stddev=0.2), shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        contracted = ((inputs.ndim - 1,), (0,)), ((), ())
        return (
            lax.dot_general(inputs, kernel.transpose(), contracted) + bias[None, None]
        )


class FlaxGPT2Attention(nn.Module):
    def setup(self):
        self.c_attn = FlaxConv1D(3 * EMB)
        self.c_proj = FlaxConv1D(EMB)

    def __call__(self, hidden_states, attention_mask):
        query, key, value = (
            x.reshape(*x.shape[:2], HEADS, EMB // HEADS)
            for x in jnp.split(self.c_attn(hidden_states), 3, axis=2)
        )
        causal_mask = nn.make_causal_mask(jnp.ones((1, query.shape[1]), dtype="bool"))
        mask = nn.combine_masks(attention_mask[:, None, None] > 0, causal_mask)
        bias = lax.select(
            mask > 0,
            jnp.full(mask.shape, 0.0),
            jnp.full(mask.shape, jnp.finfo(jnp.float32).min),
        )
        weights = nn.dot_product_attention_weights(query, key, bias=bias)
        out = jnp.einsum("...hqk,...khd->...qhd", weights, value)
        return self.c_proj(out.reshape(hidden_states.shape))


class FlaxGPT2Block(nn.Module):
    def setup(self):
        self.ln_1, self.ln_2 = nn.LayerNorm(epsilon=1e-5), nn.LayerNorm(epsilon=1e-5)
        self.attn = FlaxGPT2Attention()
        self.c_fc, self.c_proj = FlaxConv1D(4 * EMB), FlaxConv1D(EMB)

    def __call__(self, hidden_states, attention_mask):
        hidden_states += self.attn(self.ln_1(hidden_states), attention_mask)
        act = functools.partial(nn.gelu, approximate=True)
        return hidden_states + self.c_proj(act(self.c_fc(self.ln_2(hidden_states))))


class FlaxGPT2LMHeadModule(nn.Module):
    def setup(self):
        init = nn.initializers.normal(stddev=0.2)
        self.wte = nn.Embed(VOCAB, EMB, embedding_init=init)
        self.wpe = nn.Embed(POSITIONS, EMB, embedding_init=init)
        self.h = [FlaxGPT2Block(name=f"h_{i}") for i in range(LAYERS)]
        self.ln_f = nn.LayerNorm(epsilon=1e-5)

    def __call__(self, input_ids, attention_mask, position_ids):
        x = self.wte(input_ids.astype("i4")) + self.wpe(position_ids.astype("i4"))
        for block in self.h:
            x = block(x, attention_mask)
        return self.ln_f(x) @ self.wte.embedding.T


def loss_fn(apply_fn, batch):
    """The loss of transformers' run_clm_flax, over tokens that are no padding."""
    logits = apply_fn(
        batch["input_ids"], batch["attention_mask"], batch["position_ids"]
    )
    shift_mask = batch["attention_mask"][:, 1:].astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1], batch["input_ids"][:, 1:]
    )
    count = shift_mask.sum()
    return (losses * shift_mask).sum() / count, {"weight": count}


def make_batch(seed, batch_size):
    """Rows padded on the left, whose positions count the tokens."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, VOCAB, (batch_size, POSITIONS))
    mask = (np.arange(POSITIONS)[None] >= rng.integers(0, 5, (batch_size, 1))) * 1
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    return {"input_ids": ids * mask, "attention_mask": mask, "position_ids": positions}
