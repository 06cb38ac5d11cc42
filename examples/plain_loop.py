"""A training loop of one's own, which `meshpar.lower` makes parallel.

    python examples/plain_loop.py "data=2,fsdp=2,tensor=2"

Three lines differ from a loop on one device: those of `from_nnx`, `lower` and `step`.
"""

import sys

import jax
import numpy as np
import optax
from flax import nnx

import meshpar


class Layer(nnx.Module):
    def __init__(self, rngs):
        up, down = ({"out_sharding": d} for d in (("embed", "mlp"), ("mlp", "embed")))
        options = {"use_bias": False, "rngs": rngs}
        self.up = nnx.Linear(32, 64, kernel_metadata=up, **options)
        self.down = nnx.Linear(64, 32, kernel_metadata=down, **options)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss(net, batch):
    error = net(batch["x"]) - batch["y"]
    return (error**2).mean(), {"mae": abs(error).mean()}


def batches(path="", batch_size=32):
    """Batches of the rows of an npz file with arrays x and y, or of random ones."""
    random = np.random.default_rng(0)
    x = random.normal(size=(1000, 32)).astype(np.float32)
    arrays = (
        dict(np.load(path, allow_pickle=False)) if path else {"x": x, "y": np.sin(x)}
    )
    while True:
        rows = random.choice(len(arrays["x"]), batch_size, replace=False)
        yield {name: arrays[name][rows] for name in ("x", "y")}


def train(layout, steps=100, path=""):
    """Trains; returns the loss of every step and the trained weights."""
    data, losses = batches(path), []
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    model, optimizer = meshpar.from_nnx(Net, loss, layers="layers"), optax.adam(1e-2)
    program = meshpar.lower(model, optimizer, layout, next(data), devices=devices)
    state = program.init(seed=0)
    for step in range(steps):
        state, metrics = program.step(state, next(data))
        losses.append(float(metrics["loss"]))
        if step % 10 == 0:
            print(f"step {step}: loss {losses[-1]:.4f}, mae {metrics['mae']:.4f}")
    return losses, program.weights(state)


if __name__ == "__main__":
    meshpar.simulate(8)  # 8 CPU devices, unless there is an accelerator
    train(sys.argv[1])
