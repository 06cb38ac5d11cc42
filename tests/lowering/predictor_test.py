"""Predictions under a layout equal those of one device, for batches of any size."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from support.marks import slow

import meshpar
from tests.support import tiny_models


def logits(model, batch):
    return model(batch["tokens"])


@pytest.fixture(scope="module")
def expected():
    program = tiny_models.lower("data=1")
    return np.asarray(program.predictor(logits)(program.init().params, inputs(8)))


def inputs(rows):
    return {"tokens": tiny_models.batch(seed=3)["tokens"][:rows]}


@pytest.mark.parametrize(
    "layout", ["fsdp=4,tensor=2", slow("data=8"), slow("pipe=2,fsdp=2,microbatches=4")]
)
def test_equal_to_one_device(layout, expected):
    program = tiny_models.lower(layout)
    predict, params = program.predictor(logits), program.init().params
    found = np.asarray(predict(params, inputs(8)))
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_a_model_with_its_layers_stacked_by_meshpar():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    model = meshpar.from_nnx(Net, lambda net, b: net(b["x"]).mean(), layers="blocks")
    batch = {"x": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}
    found = []
    for layout in ("data=1", "pipe=2,data=2,microbatches=2"):
        layout = meshpar.layouts.parse(layout)
        devices = jax.devices()[: layout.num_devices]
        program = meshpar.lower(model, optax.sgd(1.0), layout, batch, devices=devices)
        predict = program.predictor(lambda net, x: net(x))
        found.append(np.asarray(predict(program.init().params, batch["x"][:4])))
    # Entries near 0 are sums that cancel; their error counts beside the others.
    np.testing.assert_allclose(*found, rtol=1e-6, atol=1e-6 * np.abs(found[0]).max())


def test_rows_that_do_not_divide_are_refused():
    program = tiny_models.lower("data=8")
    with pytest.raises(meshpar.LayoutError, match="6 rows.*data=8.*add rows"):
        program.predictor(logits)(program.init().params, inputs(6))
