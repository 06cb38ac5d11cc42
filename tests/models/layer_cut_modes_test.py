"""Layers that run one by one have the noise and the mode that the model gives them."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.cut_models import (
    CUTS,
    DEPTH,
    EMBED,
    LENGTH,
    ROWS,
    batch,
    linen_cut,
    nnx_cut,
)
from support.marks import first, slow

import meshpar


class Noise(nnx.Module):
    """Adds 1 to half of its activations; `kind` makes a pattern."""

    def __init__(self, kind, rngs):
        self.kind = kind
        self.w = nnx.Param(jnp.zeros(()))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(jnp.full_like(x, 0.5)) + self.w[...]


class Noises(nnx.Module):
    def __init__(self, kinds, rngs):
        self.layers = nnx.List([Noise(kind, rngs) for kind in kinds])


class LinenNoise(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        w = self.param("w", nn.initializers.zeros, ())
        return x + nn.Dropout(0.5, deterministic=False)(jnp.full_like(x, 0.5)) + w, None


class LinenNoises(nn.Module):
    scan: bool

    @nn.compact
    def __call__(self, x):
        if self.scan:
            axes, split = {"params": 0}, {"params": True, "dropout": True}
            noises = nn.scan(LinenNoise, variable_axes=axes, split_rngs=split, length=4)
            return noises(name="noise")(x, None)[0]
        for number in range(4):
            x, _ = LinenNoise(name=f"noise_{number}")(x)
        return x


def mixed(x):
    """Whether some layers added 1 to an element and others did not."""
    return x.mean(), {"mixed": ((x > 0) & (x < 4)).mean()}


def nnx_noise(*kinds):
    def loss(net, batch):
        x = batch["x"]
        for layer in net.layers:
            x = layer(x)
        return mixed(x)

    return meshpar.from_nnx(lambda rngs: Noises(kinds, rngs), loss, layers="layers")


def linen_noise(scan):
    layers = "noise" if scan else "noise_*"
    return meshpar.from_linen(
        LinenNoises(scan),
        lambda apply, batch: mixed(apply(batch["x"])),
        jnp.zeros((1, 1)),
        layers=layers,
    )


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(nnx_noise, 0, 0, 0, 0),
        functools.partial(nnx_noise, 0, 1, 0, 1),
        functools.partial(linen_noise, False),
        functools.partial(linen_noise, True),
    ],
    ids=["nnx", "nnx_pattern", "linen", "linen_scan"],
)
def test_each_layer_draws_its_own_noise(make):
    model, data = make(), {"x": jnp.zeros((64, 64))}
    params = model.init(jax.random.key(0))
    loss = jax.jit(model.loss)
    found = [loss(params, data, jax.random.key(number)) for number in (0, 0, 1)]
    assert found[0].loss == found[1].loss != found[2].loss
    # 4 draws are all equal in 2 of 16 cases; 2 draws, each used twice, in half of them.
    assert found[0].aux["mixed"] == pytest.approx(14 / 16, abs=0.03)


@pytest.mark.parametrize(
    "cut",
    [
        nnx_cut(1, 1, rate=0.5),
        slow(linen_cut(rate=0.5)),
        slow(linen_cut(rate=0.5, remat=True)),
        slow(linen_cut("block", rate=0.5, scan=True)),
    ],
    ids=["nnx", "linen", "linen_remat", "linen_scan"],
)
def test_dropout_runs_in_training_alone(cut):
    """Linen: the layers get their mode from the call, not from `module.init`."""
    whole, layered = cut.make(""), cut.make(cut.layers)
    params = jax.jit(whole.init)(jax.random.key(0))
    stacked = layered.stack_variables(params)
    want = jax.jit(whole.evaluation_loss)(params, batch()).loss
    got = jax.jit(layered.evaluation_loss)(stacked, batch()).loss
    np.testing.assert_allclose(got, want, rtol=1e-5)
    loss = jax.jit(layered.loss)
    losses = [loss(stacked, batch(), jax.random.key(k)).loss for k in (0, 1)]
    assert len({float(x) for x in (*losses, want)}) == 3


def test_a_loss_function_may_set_the_mode_of_nnx_layers():
    def loss(net, batch):
        net.eval()
        x = batch["x"]
        for layer in net.layers:
            x = layer(x)
        return x.mean()

    def make(rngs):
        return Noises((0, 0), rngs)

    model = meshpar.from_nnx(make, loss, layers="layers")
    params = model.init(jax.random.key(0))
    data = {"x": jnp.zeros((4, 4))}
    assert model.loss(params, data, jax.random.key(0)).loss == 1.0


class ByField(nn.Module):
    """A module whose mode is a field, of its layers as well."""

    deterministic: bool = False

    @nn.compact
    def __call__(self, x):
        for number in range(2):
            x = nn.Dense(EMBED, name=f"layer_{number}")(x)
        return nn.Dropout(0.5, deterministic=self.deterministic)(x)


class Fields(nn.Module):
    deterministic: bool = False

    @nn.compact
    def __call__(self, x):
        for number in range(2):
            x = ByField(self.deterministic, name=f"layer_{number}")(x)
        return x


def test_the_evaluation_module_sets_the_mode_of_its_layers():
    model = meshpar.from_linen(
        Fields(),
        lambda apply, batch: apply(batch["x"]).mean(),
        jnp.zeros((1, EMBED)),
        layers="layer_*",
        evaluation_module=Fields(deterministic=True),
    )
    params = model.init(jax.random.key(0))
    data = {"x": jnp.ones((4, EMBED))}
    got = model.evaluation_loss(params, data).loss
    own = {f"layer_{n}": {} for n in range(2)}
    for path, x in model.stack_variables(params).items():
        _, name, leaf = path.split("/")
        for number in range(2):
            own[f"layer_{number}"].setdefault(name, {})[leaf] = x[number]
    want = Fields(deterministic=True).apply({"params": own}, data["x"]).mean()
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert model.loss(params, data, jax.random.key(0)).loss != got


CONTEXT = {
    "nnx": ([(ROWS, LENGTH, EMBED)], ["bool", "int32"]),
    "linen_scan": ([(ROWS, LENGTH, EMBED)], ["bool"]),
    "encoder_decoder": (
        [(ROWS, LENGTH, EMBED), (ROWS, LENGTH, EMBED), (LENGTH, LENGTH)],
        ["bool"],
    ),
}


@pytest.mark.parametrize("name", CONTEXT)
def test_arguments_with_a_gradient_are_activations_and_others_are_context(name):
    cut, (activations, dtypes) = CUTS[name], CONTEXT[name]
    layered = cut.make(cut.layers).layered
    assert layered.depth == DEPTH
    params = cut.make(cut.layers).params
    shared = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for path, x in layered.split(dict(params))[0].items()
    }
    key = jax.eval_shape(lambda: jax.random.key(0))
    x = jax.eval_shape(layered.embed, shared, batch(), key)
    assert [a.shape for a in jax.tree.leaves(x)] == activations
    assert [a.shape for a in layered.kept(x)] == activations[1:]
    context = jax.eval_shape(layered.context, shared, batch(), key)
    assert [a.dtype.name for a in context] == dtypes


@pytest.mark.parametrize(
    "name", first(1, ["linen_scan", "nnx_pattern", "linen_pattern"])
)
def test_the_whole_module_runs_with_stacked_parameters(name):
    cut = CUTS[name]
    whole, layered = cut.make(""), cut.make(cut.layers)
    params = whole.init(jax.random.key(0))
    want = whole.bind(params)(batch()["tokens"])
    got = layered.bind(layered.init(jax.random.key(0)))(batch()["tokens"])
    np.testing.assert_array_equal(got, want)
