"""A run file as a user writes it: nothing of it is about parallelism."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshpar


class Layer(nnx.Module):
    def __init__(self, width, rngs):
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Net(nnx.Module):
    def __init__(self, width, depth, rngs):
        self.first = nnx.Linear(8, width, rngs=rngs)
        self.layers = nnx.List([Layer(width, rngs) for _ in range(depth)])
        self.last = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)[:, 0]


def loss(model, batch):
    error = model(batch["x"]) - batch["y"]
    return jnp.mean(error**2), {"mae": jnp.mean(jnp.abs(error))}


def net(width: int = 16, depth: int = 4, batch_size: int = 16, steps: int = 12):
    """Regression on a sine.

    Args:
      width: features of a layer.
      depth: number of layers.
    """
    x = np.random.default_rng(0).normal(size=(300, 8)).astype(np.float32)
    y = np.sin(x.sum(axis=-1))
    return meshpar.Run(
        lambda rngs: Net(width, depth, rngs),
        optax.adamw(optax.cosine_decay_schedule(1e-2, steps)),
        {"x": x[:240], "y": y[:240]},
        loss,
        evaluation={"x": x[240:], "y": y[240:]},
        layers="layers",
    )
