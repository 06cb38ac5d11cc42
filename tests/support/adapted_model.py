"""A small model with frozen weights and LoRA adapters, and its plain training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshpar

ROWS, WIDTH, HIDDEN, RANK, DEPTH = 16, 8, 16, 4, 4


class Block(nnx.Module):
    """A block whose weights are adapted by `nnx.LoRA`, and an int8 table."""

    def __init__(self, rngs):
        def linear(first, second, *dims):
            metadata = {"out_sharding": dims}
            made = nnx.Linear(
                first, second, use_bias=False, kernel_metadata=metadata, rngs=rngs
            )
            adapter = nnx.LoRA(
                first, RANK, second, base_module=made, b_initializer=small, rngs=rngs
            )
            adapter.lora_a.set_metadata("out_sharding", (dims[0], None))
            adapter.lora_b.set_metadata("out_sharding", (None, dims[1]))
            return adapter

        small = nnx.initializers.normal(0.1)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.norm.scale.set_metadata("out_sharding", ("embed",))
        self.up = linear(WIDTH, HIDDEN, "embed", "mlp")
        self.down = linear(HIDDEN, WIDTH, "mlp", "embed")
        ids = jnp.arange(WIDTH * HIDDEN, dtype=jnp.int8).reshape(WIDTH, HIDDEN)
        self.quantized = nnx.Param(ids, out_sharding=("embed", "mlp"))

    def __call__(self, x_BD):
        h_BD = self.norm(x_BD)
        quantized = x_BD @ (self.quantized[...].astype(x_BD.dtype) / 127)
        h_BF = self.up(h_BD) + 0.1 * quantized
        return x_BD + self.down(nnx.gelu(h_BF))


class Net(nnx.Module):
    def __init__(self, rngs):
        dims = {"out_sharding": (None, "embed")}
        self.embed = nnx.Linear(
            WIDTH, WIDTH, use_bias=False, kernel_metadata=dims, rngs=rngs
        )
        self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])
        self.head = nnx.Linear(
            WIDTH,
            WIDTH,
            use_bias=False,
            kernel_metadata={"out_sharding": ("embed", None)},
            rngs=rngs,
        )

    def __call__(self, x_BD):
        x_BD = self.embed(x_BD)
        for block in self.blocks:
            x_BD = block(x_BD)
        return self.head(x_BD)


def loss(net, batch):
    return jnp.square(net(batch["x"]) - batch["y"]).mean()


@functools.cache
def model(trained=nnx.LoRAParam, layers="blocks"):
    return meshpar.from_nnx(Net, loss, layers=layers, trained=trained)


def rows(seed=0):
    x = np.random.default_rng(seed).normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(3 * x)}


def lower(layout, of=None, optimizer=None, **options):
    layout = meshpar.layouts.parse(layout)
    return meshpar.lower(
        of or model(),
        optimizer or optax.adam(1e-2, eps=1e-2),
        layout,
        rows(),
        devices=jax.devices()[: layout.num_devices],
        **options,
    )


def train(program, steps=3):
    state, losses = program.init(0), []
    for number in range(steps):
        state, metrics = program.step(state, rows(number))
        losses.append(float(metrics["loss"]))
    return state, losses


def train_plainly(optimizer, trained, steps=3):
    """(losses, state of the module) of the usual loop of NNX."""
    whole = model(trained, layers="")
    params = whole.init(jax.random.key(0))
    own = {p: x for p, x in params.items() if whole.params[p].trained}
    losses, state = [], optimizer.init(own)

    @jax.jit
    def step(own, state, batch):
        def value(own):
            return loss(whole.bind(params | own), batch)

        value, grads = jax.value_and_grad(value)(own)
        updates, state = optimizer.update(grads, state, own)
        return optax.apply_updates(own, updates), state, value

    for number in range(steps):
        own, state, value = step(own, state, rows(number))
        losses.append(float(value))
    return losses, whole.bind(params | own)
