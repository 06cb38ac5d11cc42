"""Small models without layers, for searches over their operators."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshpar
from meshpar.mesh.machine import machine_of
from meshpar.methods.flexflow.choices import SEARCHED, Choices
from meshpar.methods.flexflow.ledger import Ledger
from meshpar.methods.flexflow.step_trace import trace_step
from meshpar.methods.flexflow.strategies import Strategies

ADAM = optax.adam(1e-2)


def linear(inputs, outputs, rngs):
    return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)


def squares(module, batch):
    return ((module(batch["x"]) - batch["y"]) ** 2).mean()


def squares_batch(rows, inputs, outputs):
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(rows, inputs)).astype(np.float32),
        "y": random.normal(size=(rows, outputs)).astype(np.float32),
    }


def mlp(*sizes):
    """A chain of matmuls with an activation between them."""

    class Mlp(nnx.Module):
        def __init__(self, rngs):
            pairs = zip(sizes, sizes[1:], strict=False)
            self.layers = nnx.List([linear(a, b, rngs) for a, b in pairs])

        def __call__(self, x):
            for layer in self.layers[:-1]:
                x = nnx.gelu(layer(x))
            return self.layers[-1](x)

    return meshpar.from_nnx(Mlp, squares)


class Towers(nnx.Module):
    """Two towers whose features are concatenated."""

    D, E, F, V = 16, 32, 64, 8

    def __init__(self, rngs):
        self.left = linear(self.D, self.F, rngs)
        self.right = linear(self.E, self.F, rngs)
        self.head = linear(2 * self.F, self.V, rngs)

    def __call__(self, x):
        left, right = x[:, : self.D], x[:, self.D :]
        both = [nnx.gelu(self.left(left)), nnx.gelu(self.right(right))]
        return self.head(jnp.concatenate(both, axis=1))


class Scanned(nnx.Module):
    """An embedding, and layers that `jax.lax.scan` runs."""

    DEPTH, D = 3, 16

    def __init__(self, rngs):
        self.embed = linear(self.D, self.D, rngs)
        shape = (self.DEPTH, self.D, self.D)
        self.stack = nnx.Param(jax.random.normal(rngs.params(), shape) / 4)

    def __call__(self, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jax.lax.scan(layer, self.embed(x), self.stack[...])[0]


class Attention(nnx.Module):
    """One block of attention over rows of a fixed length."""

    L, D, N = 8, 32, 8

    def __init__(self, rngs):
        self.inward = nnx.List([linear(self.D, self.D, rngs) for _ in range(3)])
        self.out = linear(self.D, self.D, rngs)

    def __call__(self, x_BF):
        x_BLD = x_BF.reshape(-1, self.L, self.D)
        heads = (w(x_BLD).reshape(-1, self.L, self.N, 4) for w in self.inward)
        read = jax.nn.dot_product_attention(*heads)
        return self.out(read.reshape(x_BLD.shape)).reshape(x_BF.shape)


class Convolutional(nnx.Module):
    """Convolutions with few weights, then dense layers with nearly all of them."""

    def __init__(self, rngs):
        def conv(inputs, outputs, stride):
            return nnx.Conv(
                *(inputs, outputs, (3, 3), stride), use_bias=False, rngs=rngs
            )

        self.convs = nnx.List([conv(3, 16, 1), conv(16, 16, 2)])
        self.dense = nnx.List([linear(1024, 2048, rngs), linear(2048, 8, rngs)])

    def __call__(self, x):
        x = x.reshape(-1, 16, 16, 3)
        for conv in self.convs:
            x = nnx.gelu(conv(x))
        x = x.reshape(x.shape[0], -1)
        return self.dense[1](nnx.gelu(self.dense[0](x)))


def machine(**fields):
    """The devices of the tests as one machine, with other rates of the chip."""
    fields = {"peak_flops": 7e10} | fields
    made = machine_of(jax.devices()[:8])
    own = {f.name for f in dataclasses.fields(made)}
    chip = {name: value for name, value in fields.items() if name not in own}
    made = dataclasses.replace(made, chip=dataclasses.replace(made.chip, **chip))
    return dataclasses.replace(made, **{k: v for k, v in fields.items() if k in own})


def abstract(batch):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def strategies(model, batch, on=None, graph=None, zero=2, **sizes):
    """The states of one mesh."""
    sizes = {axis: sizes.get(axis, 1) for axis in SEARCHED}
    graph = graph or trace_step(model, abstract(batch), None, {})
    params = {path: jnp.zeros(p.shape) for path, p in model.params.items()}
    state = jax.eval_shape(ADAM.init, params)
    given = {"zero": zero} if sizes["fsdp"] > 1 else {}
    choices = Choices(model.params, (), sizes, given)
    ledger = Ledger(model, state, None, sizes, given)
    return Strategies(graph, choices, ledger, on or machine(), None)
