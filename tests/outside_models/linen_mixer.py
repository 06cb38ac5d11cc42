"""MLP-Mixer in Linen after its paper's code: images [B, H, W, C] and labels [B]."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax

CLASSES = 5


class MlpBlock(nn.Module):
    mlp_dim: int

    @nn.compact
    def __call__(self, x):
        y = nn.gelu(nn.Dense(self.mlp_dim)(x))
        return nn.Dense(x.shape[-1])(y)


class MixerBlock(nn.Module):
    tokens_mlp_dim: int
    channels_mlp_dim: int

    @nn.compact
    def __call__(self, x):
        y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
        y = jnp.swapaxes(MlpBlock(self.tokens_mlp_dim, name="token_mixing")(y), 1, 2)
        x = x + y
        y = nn.LayerNorm()(x)
        return x + MlpBlock(self.channels_mlp_dim, name="channel_mixing")(y)


class MlpMixer(nn.Module):
    hidden_dim: int = 16

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(self.hidden_dim, (4, 4), strides=(4, 4), name="stem")(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for _ in range(2):
            x = MixerBlock(8, 32)(x)
        x = jnp.mean(nn.LayerNorm(name="pre_head_layer_norm")(x), axis=1)
        return nn.Dense(CLASSES, name="head")(x)


def loss_fn(apply_fn, batch):
    logits = apply_fn(batch["image"])
    one_hot = nn.one_hot(batch["label"], CLASSES)
    accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
    return optax.softmax_cross_entropy(logits, one_hot).mean(), {"accuracy": accuracy}


def make_batch(seed, batch_size):
    rng = np.random.default_rng(seed)
    return {
        "image": rng.normal(size=(batch_size, 8, 8, 3)),
        "label": rng.integers(0, CLASSES, batch_size),
    }
