"""Training starts from a user's module, and its weights go back into it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.marks import slow

import meshpar
from meshpar.errors import MeshparError
from meshpar.explain.verify import verify

WIDTH = 8
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
BATCH = {"x": X, "y": np.sin(X)}


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)
        self.seen = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        return x + self.drop(jnp.tanh(self.up(x)))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Layer(rngs) for _ in range(4)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", None))
        for number in range(4):
            dense = nn.Dense(WIDTH, kernel_init=init, name=f"dense_{number}")
            x = dense(x)
        return x


def loss(net, batch):
    return jnp.square(net(batch["x"]) - batch["y"]).mean()


def lower(model, layout="data=2,fsdp=2"):
    devices = jax.devices()[:4]
    return meshpar.lower(model, optax.sgd(0.1), layout, BATCH, devices=devices)


def plain_step(net, rate=0.1):
    gradients = nnx.grad(loss)(net, BATCH)
    state = nnx.state(net, nnx.Param)
    nnx.update(net, jax.tree.map(lambda p, g: p - rate * g, state, gradients))


@pytest.mark.parametrize("layers", [slow(""), "layers"])
def test_a_module_trains_from_its_own_weights(layers):
    net, own = Net(nnx.Rngs(7)), Net(nnx.Rngs(7))
    program = lower(meshpar.from_nnx(net, loss, layers=layers))
    state, metrics = program.step(program.init(seed=1), BATCH)
    np.testing.assert_allclose(metrics["loss"], loss(own, BATCH), rtol=1e-5)
    np.testing.assert_array_equal(  # The user's module stays as it was.
        net.layers[0].up.kernel[...], own.layers[0].up.kernel[...]
    )
    plain_step(own)
    assert program.update(net, state) is net
    for one, other in zip(net.layers, own.layers, strict=True):
        np.testing.assert_allclose(one.up.kernel[...], other.up.kernel[...], rtol=1e-5)
    np.testing.assert_allclose(loss(net, BATCH), loss(own, BATCH), rtol=1e-5)


def test_a_module_is_judged_by_a_plain_loop_from_its_own_weights():
    program = lower(meshpar.from_nnx(Net(nnx.Rngs(7)), loss, layers="layers"))
    report = verify(program, None, [BATCH, BATCH])
    assert report.ok, report


def test_variables_of_a_linen_module_get_the_weights():
    module = LinenNet()
    variables = module.init(jax.random.key(3), X[:1])
    program = lower(meshpar.from_linen(module, loss, X[:1], layers="dense_*"))
    state, _ = program.step(program.init(params=variables), BATCH)
    for tree in (variables, variables["params"]):
        new = program.update(tree, state)
        assert jax.tree.structure(new) == jax.tree.structure(tree)
    new = program.update(variables, state)
    got = loss(lambda x: module.apply(new, x), BATCH)
    np.testing.assert_allclose(got, program.evaluate(state, BATCH)["loss"], rtol=1e-5)


def test_other_modules_get_no_weights():
    program = lower(meshpar.from_nnx(Net, loss))
    with pytest.raises(MeshparError, match="no variable layers/0/drop|no variable lay"):
        program.update(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), program.init())


@pytest.mark.parametrize(
    "mode", [slow(None), meshpar.LocalSGD(period=2)], ids=["", "local"]
)
def test_a_state_that_a_step_has_taken_says_so(mode):
    layout = "data=4" if mode is None else "replica=2,data=2"
    optimizer, devices = optax.sgd(0.1), jax.devices()[:4]
    model = meshpar.from_nnx(Net, loss)
    program = meshpar.lower(model, optimizer, layout, BATCH, mode=mode, devices=devices)
    state = program.init()
    after, _ = program.step(state, BATCH)
    calls = [program.step, program.evaluate]
    calls += [program.gradients] if mode is None else []
    for call in calls:
        with pytest.raises(MeshparError, match="this state was given to a step before"):
            call(state, BATCH)
    program.step(after, BATCH)


def test_what_builds_no_module_is_refused():
    net = Net(nnx.Rngs(0))
    for wrong in (nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param), 3):
        with pytest.raises(MeshparError, match="from_nnx got a .*: give a function"):
            meshpar.from_nnx(wrong, loss)
