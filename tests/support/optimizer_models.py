"""Models whose layers are in a list, small enough to train under every optimizer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import meshpar
from meshpar import layouts
from meshpar.ops.experts import Experts, MixtureConfig, mixture

DEPTH, WIDTH, LENGTH, OUTPUTS, NUM_EXPERTS = 4, 8, 2, 4, 4
EMBED = ("embed", WIDTH)


def matrix(rngs: nnx.Rngs, *dims: tuple[str | None, int]) -> nnx.Param:
    """A matrix with dims of these names and sizes."""
    names, sizes = zip(*dims, strict=True)
    return nnx.Param(rngs.params.normal(sizes) / 3, out_sharding=names)


class Layer(nnx.Module):
    """A scale, two matrices, and a bias."""

    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(WIDTH), out_sharding=("embed",))
        self.up = matrix(rngs, EMBED, ("mlp", 2 * WIDTH))
        self.bias = nnx.Param(jnp.zeros(2 * WIDTH), out_sharding=("mlp",))
        self.down = matrix(rngs, ("mlp", 2 * WIDTH), EMBED)

    def __call__(self, x_BLD: Any) -> Any:
        y_BLF = (x_BLD * self.scale[...]) @ self.up[...] + self.bias[...]
        return x_BLD + jnp.tanh(y_BLF) @ self.down[...]


class Mixture(nnx.Module):
    """A scale and a mixture of experts."""

    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(WIDTH), out_sharding=("embed",))
        experts = ("expert", NUM_EXPERTS)
        self.router = matrix(rngs, EMBED, (None, NUM_EXPERTS))
        self.up = matrix(rngs, experts, EMBED, ("mlp", WIDTH))
        self.down = matrix(rngs, experts, ("mlp", WIDTH), EMBED)

    def __call__(self, x_BLD: Any) -> Any:
        config = MixtureConfig(NUM_EXPERTS, 2, capacity_factor=4.0)
        experts = Experts(self.up[...], self.down[...])
        mixed = mixture(x_BLD * self.scale[...], self.router[...], experts, config)
        return x_BLD + mixed.y


class Net(nnx.Module):
    """Four layers of a kind, and a head."""

    def __init__(self, layer: type[nnx.Module], rngs: nnx.Rngs):
        self.layers = nnx.List([layer(rngs) for _ in range(DEPTH)])
        self.head = matrix(rngs, EMBED, (None, OUTPUTS))

    def __call__(self, x_BLD: Any) -> Any:
        for layer in self.layers:
            x_BLD = layer(x_BLD)
        return x_BLD @ self.head[...]


def loss(net: Net, batch: Any) -> Any:
    """The mean of the squared errors."""
    return jnp.square(net(batch["x"]) - batch["y"]).mean()


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Sixteen short sequences of vectors, and what is to be found of each."""
    rng = np.random.default_rng(seed)
    x, y = (rng.normal(size=(16, LENGTH, n)) for n in (WIDTH, OUTPUTS))
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def lower(
    layout: str, optimizer: Any, layer: type[nnx.Module] = Layer, layers: str = "layers"
) -> meshpar.TrainProgram:
    """Lowers a model onto as many devices as the layout fills.

    Args:
      layout: as text.
      optimizer: of optax.
      layer: what the model has four of.
      layers: "layers" to stack them; "" to leave the model as it is.
    """
    model = meshpar.from_nnx(functools.partial(Net, layer), loss, layers=layers or None)
    devices = jax.devices()[: layouts.parse(layout).num_devices]
    return meshpar.lower(model, optimizer, layout, batch(), devices=devices)
