r"""A model of the bytes of a text, as short as a run can be.

    meshpar run examples/my_run.py:my_run --steps=500 \
        --layout="data=2,fsdp=4" --set=path=book.txt --set=width=128

Without a path it learns this file.
"""

import pathlib

import numpy as np
import optax
from flax import nnx

import meshpar


class Layer(nnx.Module):
    def __init__(self, width, rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        return x + nnx.gelu(self.linear(x))


class Net(nnx.Module):
    """The last 16 bytes of a text -> logits of the next one."""

    def __init__(self, width, depth, rngs):
        self.embed = nnx.Embed(256, width // 16, rngs=rngs)
        self.layers = nnx.List([Layer(width, rngs) for _ in range(depth)])
        self.head = nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, last):
        x = self.embed(last).reshape(len(last), -1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(net, batch):
    logits, targets = net(batch["last"]), batch["next"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def my_run(path=__file__, width=64, depth=4, rate=1e-3):
    text = np.frombuffer(pathlib.Path(path).read_bytes(), np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(text, 17).astype(np.int32)
    data = {"last": windows[:, :-1], "next": windows[:, -1]}
    return meshpar.Run(
        lambda rngs: Net(width, depth, rngs),
        optax.adam(rate),
        data,
        loss,
        layers="layers",
    )
