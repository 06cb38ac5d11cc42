"""Models that keep running state, their rows and their training."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshpar

WIDTH, ROWS, STEPS = 8, 16, 5
NAMES = "allow=scale|bias"


def rows(seed=0):
    x = np.random.default_rng(seed).normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x + 1, "y": np.sin(x)}


def lower(model, layout, **options):
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    options = {"optimizer": optax.sgd(0.1, momentum=0.9), "devices": devices} | options
    return meshpar.lower(model, layout=layout, batch=rows(), **options)


def train(program, steps=STEPS, data=rows):
    state, losses = program.init(0), []
    for number in range(steps):
        state, metrics = program.step(state, data(number))
        losses.append(float(metrics["loss"]))
    return state, losses


class Counting(nnx.Module):
    """A counter, a mean over rows, and constants of every form."""

    def __init__(self, rngs):
        dims = {"out_sharding": ("embed", None)}
        self.linear = nnx.Linear(
            WIDTH, WIDTH, use_bias=False, kernel_metadata=dims, rngs=rngs
        )
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))
        self.mean = nnx.Variable(jnp.zeros(WIDTH))
        self.shift = jnp.arange(float(WIDTH)) / WIDTH
        self.host_shift = np.arange(WIDTH, dtype=np.float32)
        self.listed = nnx.data([jnp.ones(WIDTH)])

    def __call__(self, x_BD):
        self.count.set_value(self.count.get_value() + 1)
        mean_D = x_BD.mean(axis=0)
        self.mean.set_value(0.75 * self.mean.get_value() + 0.25 * mean_D)
        x_BD = x_BD + (self.shift * self.host_shift * self.listed[0])[None]
        return self.linear(x_BD)


class Spectral(nn.Module):
    """Linen's SpectralNorm keeps a vector that follows the weights, not the batch."""

    @nn.compact
    def __call__(self, x_BD, train=True):
        dense = nn.Dense(WIDTH, use_bias=False)
        return nn.SpectralNorm(dense)(x_BD, update_stats=train)


def squared(module, batch):
    return jnp.square(module(batch["x"]) - batch["y"]).mean()


def squared_in_evaluation(apply, batch):
    return jnp.square(apply(batch["x"], train=False) - batch["y"]).mean()


COUNTING = meshpar.from_nnx(Counting, squared)
SPECTRAL = meshpar.from_linen(
    Spectral(), squared, jnp.ones((1, WIDTH)), squared_in_evaluation
)


def changing(value):
    """A model whose state becomes value(old, rows)."""

    class Changing(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones(WIDTH), out_sharding=("embed",))
            self.seen = nnx.Variable(jnp.zeros(()))

        def __call__(self, x_BD):
            self.seen.set_value(value(self.seen.get_value(), x_BD))
            return x_BD * self.w[...][None]

    return meshpar.from_nnx(Changing, squared)
