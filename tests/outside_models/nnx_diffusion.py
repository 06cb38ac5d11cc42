"""A diffusion model in NNX as its tutorials have it: a U-Net that predicts noise."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

WIDTH, STEPS = 8, 100


def time_embedding(t, width):
    rates = jnp.exp(jnp.linspace(0.0, -6.0, width // 2))
    angles = t[:, None] * rates[None]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class ResBlock(nnx.Module):
    def __init__(self, inputs, outputs, *, rngs):
        self.norm = nnx.GroupNorm(inputs, num_groups=2, rngs=rngs)
        self.conv = nnx.Conv(inputs, outputs, (3, 3), rngs=rngs)
        self.time = nnx.Linear(WIDTH, outputs, rngs=rngs)
        self.skip = nnx.Conv(inputs, outputs, (1, 1), rngs=rngs)

    def __call__(self, x, t):
        y = self.conv(nnx.silu(self.norm(x))) + self.time(nnx.silu(t))[:, None, None]
        return y + self.skip(x)


class UNet(nnx.Module):
    def __init__(self, *, rngs):
        self.first = nnx.Conv(1, WIDTH, (3, 3), rngs=rngs)
        self.down = ResBlock(WIDTH, 2 * WIDTH, rngs=rngs)
        self.middle = ResBlock(2 * WIDTH, 2 * WIDTH, rngs=rngs)
        self.up = ResBlock(3 * WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.GroupNorm(WIDTH, num_groups=2, rngs=rngs)
        self.last = nnx.Conv(WIDTH, 1, (3, 3), rngs=rngs)

    def __call__(self, x, t):
        t = time_embedding(t, WIDTH)
        x = self.first(x)
        y = nnx.avg_pool(self.down(x, t), (2, 2), strides=(2, 2))
        y = self.middle(y, t)
        y = y.repeat(2, axis=1).repeat(2, axis=2)
        y = self.up(jnp.concatenate([x, y], axis=-1), t)
        return self.last(nnx.silu(self.norm(y)))


def loss_fn(model, batch):
    """The error of the noise that the model finds in noisy images."""
    alpha = jnp.cos(0.5 * jnp.pi * batch["time"] / STEPS)[:, None, None, None] ** 2
    noisy = jnp.sqrt(alpha) * batch["image"] + jnp.sqrt(1 - alpha) * batch["noise"]
    return jnp.mean((model(noisy, batch["time"]) - batch["noise"]) ** 2)


def make_batch(seed, batch_size):
    rng = np.random.default_rng(seed)
    image, noise = rng.normal(size=(2, batch_size, 8, 8, 1)).astype(np.float32)
    time = rng.uniform(1, STEPS - 1, batch_size).astype(np.float32)
    return {"image": image, "noise": noise, "time": time}
