"""A stack of four matrices with a weighted loss, which compiles in a blink."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshpar
from meshpar import layouts

BATCH, DIM = 16, 8


class Net(nnx.Module):
    def __init__(self, rngs, dim=DIM):
        def linear(rngs):
            dims = {"out_sharding": ("embed", "mlp")}
            return nnx.Linear(dim, dim, use_bias=False, kernel_metadata=dims, rngs=rngs)

        stacked = nnx.vmap(linear, transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.layers = stacked(rngs.split(4))
        head = rngs.params.normal((dim, 1)) / 3
        self.head = nnx.Param(head, out_sharding=("embed", None))


def weight(batch):
    """The weight of a part of the batch among all parts."""
    return batch["weight"].sum()


def head_loss(net, x_BD, batch):
    errors_B = jnp.square((x_BD @ net.head[...])[:, 0] - batch["y"])
    mean = (batch["weight"] * errors_B).sum() / batch["weight"].sum()
    return mean, {"weight": weight(batch)}


def model(dim=DIM):
    stack = meshpar.LayerStack(
        stack="layers",
        embed=lambda net, batch: batch["x"],
        layer=lambda linear, x_BD: x_BD + jnp.tanh(linear(x_BD)),
        head_loss=head_loss,
    )
    return meshpar.from_nnx(functools.partial(Net, dim=dim), stack)


def batch(seed=0, dim=DIM):
    """Rows whose weights grow, so that parts of the batch differ in weight."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(BATCH, dim)).astype(np.float32),
        "y": rng.normal(size=BATCH).astype(np.float32),
        "weight": np.arange(1, BATCH + 1, dtype=np.float32),
    }


def lower(layout, lowering="", optimizer=None, dim=DIM, **options):
    layout = layouts.parse(layout) if isinstance(layout, str) else layout
    return meshpar.lower(
        model(dim),
        optimizer or optax.adamw(1e-2, eps=1e-2),
        layout,
        batch(dim=dim),
        devices=jax.devices()[: layout.num_devices],
        lowering=lowering,
        **options,
    )
