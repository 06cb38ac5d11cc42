"""A classifier with two layers, whose plain loss judges programs."""

from flax import nnx

import meshpar

ROWS, CLASSES = 16, 3


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return x + nnx.gelu(self.dense(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])
        self.head = nnx.Linear(4, CLASSES, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(meshpar.layouts.constrain(x, "batch", "embed"))
