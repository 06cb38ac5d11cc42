"""Local SGD: two replicas train apart, and average their weights every four steps.

    python examples/replicas_apart.py

The averages arrive one step after they were taken, while training goes on.
"""

import jax
import numpy as np
import optax
from flax import nnx

import meshpar

PERIOD, STALENESS = 4, 1


def make_model(rngs):
    return nnx.Linear(8, 1, rngs=rngs)


def loss(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def batches(num_rows=32):
    random = np.random.default_rng(0)
    slope = random.normal(size=(8, 1)).astype(np.float32)
    while True:
        x = random.normal(size=(num_rows, 8)).astype(np.float32)
        yield {"x": x, "y": x @ slope}


def train(steps=20, period=PERIOD, staleness=STALENESS):
    """The losses, the bytes that replicas exchanged in each step, and the weights."""
    data, devices = batches(), jax.devices()[:2]
    mode = meshpar.LocalSGD(period=period, staleness=staleness)
    model, optimizer = meshpar.from_nnx(make_model, loss), optax.sgd(0.1)
    program = meshpar.lower(
        model, optimizer, "replica=2", next(data), mode=mode, devices=devices
    )
    state, losses, sent = program.init(seed=0), [], []
    for _ in range(steps):
        state, metrics = program.step(state, next(data))
        losses.append(float(metrics["loss"]))
        sent.append(float(metrics["replica_bytes"]))
    return losses, sent, program.weights(state)


if __name__ == "__main__":
    meshpar.simulate(8)
    losses, sent, _ = train()
    for step, (value, size) in enumerate(zip(losses, sent, strict=True), 1):
        print(f"step {step:2}: loss {value:.5f}, {size:.0f} bytes between replicas")
