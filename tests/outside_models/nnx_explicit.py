"""A network in NNX after the guides to explicit sharding: every array says its axes."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

WIDTH, HIDDEN, HEADS = 16, 32, 4
AXES = "data", "model"
"""Axes of the mesh that the guides make, all explicit."""


class DotReluDot(nnx.Module):
    def __init__(self, *, rngs):
        init = nnx.initializers.lecun_normal()
        up, down = (WIDTH, HIDDEN), (HIDDEN, WIDTH)
        self.w1 = nnx.Param(init(rngs.params(), up), out_sharding=("data", "model"))
        self.w2 = nnx.Param(init(rngs.params(), down), out_sharding=("model", "data"))

    def __call__(self, x):
        w1, w2 = reshard(self.w1[...], P(None, "model")), self.w2[...]
        x_BF = jnp.dot(x, w1, out_sharding=P("data", "model"))
        x_BNH = jnp.reshape(
            x_BF, (-1, HEADS, HIDDEN // HEADS), out_sharding=P("data", "model", None)
        )
        shape = 1, HEADS, HIDDEN // HEADS
        signs = jax.random.rademacher(jax.random.key(0), shape, jnp.float32)
        x_BNH = nnx.relu(x_BNH * reshard(signs, P(None, "model", None)))
        zeros = jnp.zeros(x_BNH.shape, out_sharding=P("data", "model", None))
        x_BNH = jnp.maximum(x_BNH, zeros)
        x_BF = jnp.reshape(x_BNH, (-1, HIDDEN), out_sharding=P("data", "model"))
        w2 = reshard(w2, P("model", None))
        return x + jnp.matmul(x_BF, w2, out_sharding=P("data", None))


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.layers = nnx.List([DotReluDot(rngs=rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def make_batch(seed, batch_size):
    x = np.random.default_rng(seed).normal(size=(batch_size, WIDTH))
    return {"x": x.astype(np.float32), "y": np.sin(x).astype(np.float32)}
