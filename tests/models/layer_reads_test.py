"""Losses that read parts of a model which are not there when layers run one by one."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar
from meshpar.errors import MeshparError

WIDTH = 8
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
BATCH = {"x": X, "y": np.sin(X)}


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.up(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(4)])

    def __call__(self, x):
        hidden = [x]
        for layer in self.layers:
            hidden.append(layer(hidden[-1]))
        return hidden


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + jnp.tanh(nn.Dense(WIDTH)(x))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(4):
            x = Block(name=f"block_{i}")(x)
        return x


def last(net, batch):
    return jnp.square(net(batch["x"])[-1] - batch["y"]).mean()


def deep_supervision(net, batch):
    return sum(jnp.square(h - batch["y"]).mean() for h in net(batch["x"])[1:])


def early_exit(net, batch):
    return jnp.square(net(batch["x"])[2] - batch["y"]).mean()


def weights_of_layers(net, batch):
    weights = jax.tree.leaves(nnx.state(net, nnx.Param))
    return last(net, batch) + sum(jnp.square(x).sum() for x in weights)


def weights_of_blocks(apply, batch):
    weights = jax.tree.leaves(apply.variables["params"])
    value = jnp.square(apply(batch["x"]) - batch["y"]).mean()
    return value + sum(jnp.square(x).sum() for x in weights)


def lower(model, layout="data=8"):
    return meshpar.lower(model, optax.sgd(0.1), layout, BATCH)


@pytest.mark.parametrize(
    "loss, message",
    [
        (deep_supervision, r"reads the output of layer 0 of 'layers'"),
        (early_exit, r"reads the output of layer 1 of 'layers'"),
        (weights_of_layers, r"reads the parameter layers/0/up/bias of a layer"),
    ],
)
def test_what_layers_do_not_keep_is_refused_with_its_line(loss, message):
    message += r".*layer_reads_test.py:\d+\).*layers=''"
    with pytest.raises(MeshparError, match=message):
        lower(meshpar.from_nnx(Net, loss, layers="layers"))


def test_weights_of_linen_layers_are_refused():
    model = meshpar.from_linen(LinenNet(), weights_of_blocks, X[:1], layers="block_*")
    with pytest.raises(MeshparError, match="reads the parameter block_0/Dense_0/bias"):
        lower(model)


def test_an_evaluation_loss_is_read_as_well():
    model = meshpar.from_nnx(Net, last, early_exit, layers="layers")
    with pytest.raises(MeshparError, match="reads the output of layer 1"):
        lower(model)


@pytest.mark.parametrize("loss", [deep_supervision, weights_of_layers])
def test_without_layers_they_train(loss):
    program = lower(meshpar.from_nnx(Net, loss))
    net = Net(nnx.Rngs(0))
    _, metrics = program.step(program.init(params=net), BATCH)
    np.testing.assert_allclose(metrics["loss"], loss(net, BATCH), rtol=1e-5)


class Given(nnx.Module):
    """A module that is given with its dropout off and its statistics frozen."""

    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, use_running_average=True, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.drop(jnp.tanh(self.up(x))))


def plain_loss(net, batch):
    return jnp.square(net(batch["x"]) - batch["y"]).mean()


def test_modules_run_as_they_are_given():
    net = Given(nnx.Rngs(0))
    program = lower(meshpar.from_nnx(Given, plain_loss))
    start = program.init(params=net)
    mean = np.asarray(start.params["norm/mean"])
    state, metrics = program.step(start, BATCH)
    np.testing.assert_allclose(metrics["loss"], plain_loss(net, BATCH), rtol=1e-5)
    np.testing.assert_array_equal(state.params["norm/mean"], mean)


def test_layers_run_as_they_are_given():
    class Dropping(Layer):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

        def __call__(self, x):
            return x + self.drop(jnp.tanh(self.up(x)))

    class Stack(Net):
        def __init__(self, rngs):
            self.layers = nnx.List([Dropping(rngs) for _ in range(4)])

    net = Stack(nnx.Rngs(0))
    program = lower(meshpar.from_nnx(Stack, last, layers="layers"))
    _, metrics = program.step(program.init(params=net), BATCH)
    np.testing.assert_allclose(metrics["loss"], last(net, BATCH), rtol=1e-5)
