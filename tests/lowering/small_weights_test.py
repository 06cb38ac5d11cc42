"""Many small weights: the number of collectives does not grow with theirs."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.marks import slow

import meshpar


class Layer(nnx.Module):
    """A chain of small matmuls."""

    def __init__(self, num_weights, rngs):
        names = {"out_sharding": ("embed", "mlp")}
        self.weights = nnx.List(
            nnx.Param(rngs.params.normal((16, 16)) / 4, **names)
            for _ in range(num_weights)
        )

    def __call__(self, x_BD):
        for weight in self.weights:
            x_BD += jnp.tanh(x_BD @ weight[...])
        return x_BD


def make_program(num_weights, layout, layers, lowering=""):
    def make(rngs):
        return nnx.Sequential(*(Layer(num_weights // 2, rngs) for _ in range(2)))

    model = meshpar.from_nnx(make, loss_fn, layers=layers)
    optimizer = optax.adam(1e-2)
    return meshpar.lower(model, optimizer, layout, batch(), lowering=lowering)


def loss_fn(module, batch):
    return jnp.square(module(batch["x"]) - batch["y"]).mean()


def batch():
    x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    return {"x": x, "y": np.sin(x)}


def num_collectives(program):
    return collections.Counter(found.kind for found in program.collectives)


@pytest.mark.parametrize(
    "layers, lowering", [slow(None, ""), (None, "shard_map"), slow("layers", "")]
)
@pytest.mark.parametrize(
    "layout", [slow("data=8"), slow("fsdp=8"), "data=2,fsdp=4,zero=1"]
)
def test_collectives_do_not_grow_with_the_number_of_weights(layout, layers, lowering):
    few, many = (make_program(n, layout, layers, lowering) for n in (4, 16))
    assert num_collectives(few) == num_collectives(many)
    assert many.violations() == []


@pytest.mark.parametrize(
    "layout", [slow("fsdp=8"), "data=2,fsdp=4", slow("fsdp=8,zero=2")]
)
def test_weights_of_a_bucket_train_as_on_one_device(layout):
    program = make_program(4, layout, None)
    state = program.init(0)
    before = jax.device_get(state.params)

    def loss(params):
        return program.model.evaluation_loss(params, batch()).loss

    want = jax.jit(jax.grad(loss))(jax.tree.map(jnp.array, before))
    found, gradients = program.gradients(state, batch())
    np.testing.assert_allclose(found["loss"], loss(before), rtol=1e-6)
    for path, gradient in gradients.items():
        np.testing.assert_allclose(gradient, want[path], atol=1e-6)
