"""The layered form of a model: the same loss, and errors of stacks that do not fit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.tiny_models import batch, model

import meshpar

DEPTH, EMBED = 3, 4


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (EMBED, EMBED)))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x_BD):
        return x_BD + self.dropout(jnp.tanh(x_BD @ self.w[...]))


class Inner(nnx.Module):
    def __init__(self, rngs):
        stacked = nnx.split_rngs(splits=DEPTH)(nnx.vmap(Layer))
        self.layers = stacked(rngs)


class Outer(nnx.Module):
    def __init__(self, rngs):
        self.inner = Inner(rngs)
        self.scale = nnx.Param(jnp.full((EMBED,), 2.0))


LAYERS = meshpar.LayerStack(
    stack="inner.layers",
    embed=lambda module, batch: batch["x"] * module.scale[...][None],
    layer=lambda layer, x_BD: layer(x_BD),
    head_loss=lambda module, x_BD, batch: ((x_BD**2).mean(), {"peak": x_BD.max()}),
)
BATCH = {"x": np.linspace(-1, 1, 2 * EMBED, dtype=np.float32).reshape(2, EMBED)}


def test_the_loss_is_made_from_the_layers():
    model = meshpar.from_nnx(Outer, LAYERS)
    assert model.layered.prefix == "inner/layers/" and model.layered.depth == DEPTH
    params = model.init(jax.random.key(0))
    shared, stack = model.layered.split(params)
    assert set(shared) == {"scale"} and set(stack) == {"inner/layers/w"}
    x_BD = BATCH["x"] * params["scale"][None]
    for w_DD in params["inner/layers/w"]:
        x_BD = x_BD + jnp.tanh(x_BD @ w_DD)
    loss, aux = model.evaluation_loss(params, BATCH)
    np.testing.assert_allclose(loss, (x_BD**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(aux["peak"], x_BD.max(), rtol=1e-5)


def test_gradients_of_the_layered_loss_are_those_of_the_plain_loss():
    model = meshpar.from_nnx(Outer, LAYERS)

    def plain(params, batch):
        x_BD = batch["x"] * params["scale"][None]
        for w_DD in params["inner/layers/w"]:
            x_BD = x_BD + jnp.tanh(x_BD @ w_DD)
        return (x_BD**2).mean()

    params = model.init(jax.random.key(0))
    gradients = jax.grad(model.evaluation_loss, has_aux=True)(params, BATCH)[0]
    jax.tree.map(
        lambda x, expected: np.testing.assert_allclose(x, expected, rtol=1e-4),
        gradients,
        jax.grad(plain)(params, BATCH),
    )


def test_each_layer_draws_its_own_noise_from_the_key():
    layers = dataclasses.replace(
        LAYERS,
        embed=lambda module, batch: jnp.zeros((32, EMBED)),
        layer=lambda layer, x_BD: x_BD + layer.dropout(jnp.full_like(x_BD, 0.5)),
        head_loss=lambda module, x_BD, batch: (
            x_BD.mean(),
            {"mixed": ((x_BD > 0) & (x_BD < DEPTH)).mean()},
        ),
    )
    model = meshpar.from_nnx(Outer, layers)
    params = model.init(jax.random.key(0))
    keys = [jax.random.key(number) for number in (0, 0, 1)]
    losses = [model.loss(params, BATCH, key) for key in keys]
    assert losses[0][0] == losses[1][0] != losses[2][0]
    # Of 3 draws, all are equal in 2 of 8 cases; with one mask they always are.
    assert 0.5 < losses[0][1]["mixed"] < 1


def test_an_evaluation_loss_of_its_own_is_not_run_layer_by_layer():
    assert meshpar.from_nnx(Outer, LAYERS).layered.evaluates
    model = meshpar.from_nnx(Outer, LAYERS, lambda module, batch: jnp.float32(7))
    assert not model.layered.evaluates
    assert model.evaluation_loss(model.init(jax.random.key(0)), BATCH)[0] == 7


@pytest.mark.parametrize(
    "stack, words",
    [
        (
            "inner.layer",
            "Inner has no attribute .layer.; .* layers",
        ),
        ("inner.layers.dropout", "must all be the number of layers.*nnx.vmap"),
    ],
)
def test_a_stack_that_does_not_fit_is_an_error(stack, words):
    with pytest.raises(ValueError, match=words):
        meshpar.from_nnx(Outer, dataclasses.replace(LAYERS, stack=stack))


def test_weights_that_only_the_head_reads_are_found():
    layered, key = model().layered, jax.random.key(0)
    params = {path: jnp.zeros(p.shape, p.dtype) for path, p in model().params.items()}
    shared, _ = layered.split(params)
    found = layered.read_by_head_alone(shared, batch(), key)
    assert found == {"head", "norm/scale"}, sorted(shared)
