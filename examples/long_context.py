"""Attention over sequences that several devices share.

    python examples/long_context.py "fsdp=2,context=4"

Each device holds a part of every sequence; `context.attention` moves keys and values.
"""

import sys

import jax
import numpy as np
import optax
from flax import nnx

import meshpar
from meshpar.ops import context


class Block(nnx.Module):
    def __init__(self, rngs):
        heads = {"out_sharding": ("embed", "heads", None)}
        self.norm = nnx.RMSNorm(32, rngs=rngs)
        self.qkv = nnx.List(
            nnx.LinearGeneral(32, (4, 8), rngs=rngs, kernel_metadata=heads)
            for _ in range(3)
        )
        self.out = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x_BLD):
        h_BLD = self.norm(x_BLD)
        y_BLHK = context.attention(*(project(h_BLD) for project in self.qkv))
        return x_BLD + self.out(y_BLHK.reshape(x_BLD.shape))


class Net(nnx.Module):
    def __init__(self, length, rngs):
        self.tokens = nnx.Embed(64, 32, rngs=rngs)
        self.places = nnx.Embed(length, 32, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, tokens_BL):
        places = context.positions(tokens_BL.shape[1])
        x_BLD = self.tokens(tokens_BL) + self.places(places)[None]
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.head(x_BLD)


def loss(net, batch):
    logits, labels = net(batch["tokens"]), batch["next"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def sequences(num_rows=8, length=64):
    """Sequences that repeat their first half, which only attention can foresee."""
    half = np.random.default_rng(0).integers(64, size=(num_rows, length // 2))
    tokens = np.concatenate([half, half], 1).astype(np.int32)
    return {"tokens": tokens, "next": np.roll(tokens, -1, 1)}


def train(layout, steps=10, length=64):
    """The loss of every step."""
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    batch = sequences(length=length)
    model = meshpar.from_nnx(lambda rngs: Net(length, rngs), loss, layers="blocks")
    program = meshpar.lower(model, optax.adam(1e-2), layout, batch, devices=devices)
    state, losses = program.init(seed=0), []
    for _ in range(steps):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


if __name__ == "__main__":
    meshpar.simulate(8)
    print(*(f"{x:.5f}" for x in train(sys.argv[1])))
