"""A tiny model with biases, a list of modules and a stack, and its plain training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshpar

WIDTH, ROWS = 8, 16


class Layer(nnx.Module):
    def __init__(self, rngs):
        w = rngs.params.normal((WIDTH, WIDTH)) / 3
        self.w = nnx.Param(w, out_sharding=("embed", "mlp"))
        bias = rngs.params.normal((WIDTH,)) / 3
        self.bias = nnx.Param(bias, out_sharding=("embed",))


def make_model(depth=3):
    """A model with parameters layers/w, layers/bias, and ends/0/w to ends/1/bias."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(Layer, transform_metadata={nnx.PARTITION_NAME: "layers"})
            self.layers = make(rngs.split(depth))
            self.ends = nnx.List([Layer(rngs), Layer(rngs)])

    def run(layer, x_BD):
        return x_BD + jnp.tanh(x_BD @ layer.w[...] + layer.bias[...][None])

    def head_loss(net, x_BD, batch):
        return jnp.square(run(net.ends[1], x_BD) - batch["y"]).mean()

    stack = meshpar.LayerStack(
        stack="layers",
        embed=lambda net, batch: run(net.ends[0], batch["x"]),
        layer=run,
        head_loss=head_loss,
    )
    return meshpar.from_nnx(Net, stack)


def rows(seed=0):
    """A batch."""
    x = np.random.default_rng(seed).normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(3 * x)}


def lower(layout, optimizer, depth=3, **options):
    layout = meshpar.layouts.parse(layout)
    return meshpar.lower(
        make_model(depth),
        optimizer,
        layout,
        rows(),
        devices=jax.devices()[: layout.num_devices],
        **options,
    )


def nest(params):
    """The model's own nested dicts, written down by hand."""
    return {
        "layers": {name: params[f"layers/{name}"] for name in ("w", "bias")},
        "ends": {
            number: {name: params[f"ends/{number}/{name}"] for name in ("w", "bias")}
            for number in (0, 1)
        },
    }


def train_plainly(optimizer, params, steps, depth=3, batch=None):
    """Weights after every step of a plain loop of jax and optax on nested dicts.

    Args:
      optimizer: an optax transformation, or optax.MultiSteps.
      params: {path: array} to start from.
      steps: number of steps.
      depth: of the model.
      batch: of every step; by default step number n has the batch `rows(n)`.
    """
    model = make_model(depth)
    if not isinstance(optimizer, optax.MultiSteps):
        optimizer = optax.with_extra_args_support(optimizer)

    def loss(params, batch):
        flat = {f"layers/{name}": x for name, x in params["layers"].items()}
        for number, end in params["ends"].items():
            flat |= {f"ends/{number}/{name}": x for name, x in end.items()}
        return model.loss(flat, batch, jax.random.key(0))[0], flat

    @jax.jit
    def step(params, state, batch):
        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        updates, state = optimizer.update(grads, state, params, value=value, grad=grads)
        params = optax.apply_updates(params, updates)
        return params, state, loss(params, batch)[1]

    params, weights = nest(params), []
    state = optimizer.init(params)
    for number in range(steps):
        data = rows(number) if batch is None else batch
        params, state, flat = step(params, state, data)
        weights.append(jax.tree.map(np.asarray, flat))
    return weights


def train(program, steps):
    """The state after some steps of a program on the same batches."""
    state = program.init(0)
    for number in range(steps):
        state, _ = program.step(state, rows(number))
    return state
