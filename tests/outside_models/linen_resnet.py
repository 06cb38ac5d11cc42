"""A residual network in Linen after Flax's imagenet example: batch normalization."""

import functools

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax

CLASSES = 5


class ResNetBlock(nn.Module):
    filters: int
    strides: int
    conv: functools.partial
    norm: functools.partial

    @nn.compact
    def __call__(self, x):
        y = self.conv(self.filters, (3, 3), self.strides)(x)
        y = nn.relu(self.norm()(y))
        y = self.norm()(self.conv(self.filters, (3, 3))(y))
        if x.shape != y.shape:
            x = self.conv(self.filters, (1, 1), self.strides, name="conv_proj")(x)
            x = self.norm(name="norm_proj")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    num_filters: int = 8

    @nn.compact
    def __call__(self, x, train=True):
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9
        )
        x = conv(self.num_filters, (3, 3), name="conv_init")(x)
        x = nn.relu(norm(name="bn_init")(x))
        for i in range(2):
            x = ResNetBlock(self.num_filters * 2**i, 1 + i, conv, norm)(x)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(CLASSES, name="head")(x)


def loss_fn(apply_fn, batch):
    logits, _ = apply_fn(batch["image"], mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean()


def make_batch(seed, batch_size):
    rng = np.random.default_rng(seed)
    return {
        "image": rng.normal(size=(batch_size, 8, 8, 3)).astype(np.float32),
        "label": rng.integers(0, CLASSES, batch_size),
    }
