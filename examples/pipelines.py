"""One model under several pipelines, whose losses are those of one device.

    python examples/pipelines.py

A schedule says which stage does what in which tick; it changes time and memory alone.
"""

import jax
import numpy as np
import optax
from flax import nnx

import meshpar

SCHEDULES = {
    "one device": "data=1,microbatches=8",
    "GPipe": "pipe=4,microbatches=8,schedule=gpipe",
    "1F1B": "pipe=4,microbatches=8,schedule=1f1b",
    "interleaved 1F1B": "pipe=4,microbatches=8,schedule=interleaved,virtual_stages=2",
    "zero bubble": "pipe=4,data=2,microbatches=8,schedule=zb_h1",
}


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(32, rngs=rngs)
        self.linear = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x):
        return x + nnx.gelu(self.linear(self.norm(x)))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(8)])
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(net, batch):
    logits = net(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def rows(num_rows=64):
    random = np.random.default_rng(0)
    x = random.normal(size=(num_rows, 32)).astype(np.float32)
    return {"x": x, "y": x[:, :10].argmax(1)}


def train(layout, batch, steps=5):
    """The losses of some steps, and the program that made them."""
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    model = meshpar.from_nnx(Net, loss, layers="layers")
    program = meshpar.lower(model, optax.adam(1e-2), layout, batch, devices=devices)
    state, losses = program.init(seed=0), []
    for _ in range(steps):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    assert program.violations() == []
    return losses, program


if __name__ == "__main__":
    meshpar.simulate(8)
    for name, layout in SCHEDULES.items():
        losses, _ = train(layout, rows())
        print(f"{name:16}", *(f"{x:.6f}" for x in losses))
