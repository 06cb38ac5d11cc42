"""Batches are split by dim names: an axis may split the length of every leaf."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import tiny_stack
from support.marks import slow
from support.tiny_models import host, relative_error

import meshpar
from meshpar.errors import LayoutError
from meshpar.layouts import axes
from meshpar.lowering.program import Program

LENGTH = 8


class Layer(nnx.Module):
    """Works on every token by itself, with noise."""

    def __init__(self, rngs):
        self.w = nnx.Param(rngs.params.normal((8, 8)) / 3, out_sharding=("embed", None))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x_BLD):
        return x_BLD + self.dropout(jnp.tanh(x_BLD @ self.w[...]))


class Tokens(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def layers(rngs):
            return Layer(rngs)

        self.layers = layers(rngs)


def mean_loss(module, x_BLD, batch):
    del module
    count = batch["mask"].sum()
    errors = batch["mask"] * jnp.square(x_BLD.sum(-1) - batch["y"])
    return errors.sum() / count, {"weight": count}


TOKENS = meshpar.from_nnx(
    Tokens,
    meshpar.LayerStack(
        stack="layers",
        embed=lambda module, batch: batch["x"],
        layer=lambda layer, x: layer(x),
        head_loss=mean_loss,
    ),
)


def rows(length=LENGTH):
    rng = np.random.default_rng(0)
    mask = (rng.random((8, length)) < 0.7).astype(np.float32)
    mask[:, 0] = mask[0] = 1  # No shard is without a token.
    mask[:, ::2] = 1
    return {
        "x": rng.normal(size=(8, length, 8)).astype(np.float32),
        "y": rng.normal(size=(8, length)).astype(np.float32),
        "mask": mask,
    }


def lowered(layout, data, **options):
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    return meshpar.lower(
        TOKENS, optax.sgd(0.1), layout, data, devices=devices, **options
    )


@pytest.fixture
def fsdp_splits_the_length(monkeypatch):
    monkeypatch.setitem(axes.BATCH_DIMS, "batch", ("data",))
    monkeypatch.setitem(axes.BATCH_DIMS, "length", ("fsdp",))


@pytest.mark.parametrize("layout", [slow("data=2,fsdp=4"), "data=2,fsdp=2,zero=2"])
def test_an_axis_may_split_the_length(layout, fsdp_splits_the_length):
    """Placing, noise and sums follow the spec: the gradients equal one device's."""
    data, results = rows(), []
    for text in ("data=1", layout):
        program = lowered(text, data)
        metrics, grads = program.gradients(program.init(0), data)
        results.append((host(metrics), host(grads)))
    (want_metrics, want), (metrics, grads) = results
    assert metrics["loss"] == pytest.approx(want_metrics["loss"], rel=1e-5)
    assert metrics["weight"] == want_metrics["weight"]
    assert relative_error(grads, want) < 1e-5
    placed = program.place_batch(data)
    shape = placed["x"].addressable_shards[0].data.shape
    assert shape == (4, LENGTH // program.layout.fsdp, 8)
    np.testing.assert_array_equal(placed["y"], data["y"])


def test_a_length_that_does_not_divide_is_refused(fsdp_splits_the_length):
    with pytest.raises(LayoutError, match="dim 1 does not divide over fsdp=4"):
        lowered("data=2,fsdp=4", rows(length=6))


def test_a_program_needs_no_optimizer():
    """Parameters and evaluation stand below what trains."""
    train = tiny_stack.lower("fsdp=2")
    lowering = dataclasses.replace(train.lowering, optimizer=None)
    program = Program(lowering, train.abstract_batch)
    params = program.init_params(seed=3)
    state = train.init(3)
    for path, value in host(state.params).items():
        np.testing.assert_array_equal(params[path], value, err_msg=path)
    batch = tiny_stack.batch()
    loss = program.evaluate_params(params, batch)["loss"]
    assert float(loss) == float(train.evaluate(state, batch)["loss"])
