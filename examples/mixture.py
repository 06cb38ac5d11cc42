"""A mixture of eight experts, two for each row, over the axis `expert`.

    python examples/mixture.py "data=2,expert=4"

`experts.mixture` follows the layout: each row goes to the devices of its experts.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshpar
from meshpar.ops import experts

CONFIG = experts.MixtureConfig(num_experts=8, experts_per_token=2)
STATISTICS = len(experts.Statistics._fields)


def weight(rngs, dims, *shape):
    value = jax.random.normal(rngs.params(), shape) * shape[-2] ** -0.5
    return nnx.Param(value, out_sharding=dims)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.router = weight(rngs, ("embed", None), 32, 8)
        self.up = weight(rngs, ("expert", "embed", "mlp"), 8, 32, 64)
        self.down = weight(rngs, ("expert", "mlp", "embed"), 8, 64, 32)

    def __call__(self, x):
        x_BLD, earlier = x
        weights = experts.Experts(self.up[...], self.down[...])
        mixed = experts.mixture(x_BLD, self.router[...], weights, CONFIG)
        return x_BLD + mixed.y, mixed.statistics.after(earlier)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x_BLD):
        x = x_BLD, jnp.zeros(STATISTICS)
        for block in self.blocks:
            x = block(x)
        return x[0], experts.Statistics.unpacked(x[1])


def loss(net, batch):
    y_BLD, statistics = net(batch["x"])
    error = ((y_BLD - batch["y"]) ** 2).mean()
    return error + 0.01 * statistics.balance, {"error": error}


def sequences(num_rows=16):
    random = np.random.default_rng(0)
    x_BLD = random.normal(size=(num_rows, 8, 32)).astype(np.float32)
    return {"x": x_BLD, "y": np.sin(3 * x_BLD)}


def train(layout, steps=20):
    """The loss of every step."""
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    batch, optimizer = sequences(), optax.adam(1e-2)
    model = meshpar.from_nnx(Net, loss, layers="blocks")
    program = meshpar.lower(model, optimizer, layout, batch, devices=devices)
    state, losses = program.init(seed=0), []
    for _ in range(steps):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


if __name__ == "__main__":
    meshpar.simulate(8)
    print(*(f"{x:.5f}" for x in train(sys.argv[1])))
