"""How often a user's loss is traced, from `lower` to the contract of the first step.

A model's Python may be slow to trace, and whatever traces it once more is paid by every
program. The step itself is one trace, which also shows the names that the model uses. A
batch in parts needs three more, which show how the loss depends on its rows: those of
the whole batch, of a part, and a prime number of rows.
"""

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from support.marks import slow

import meshpar

ROWS, WIDTH = 16, 8


class Layer(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        dims = {"out_sharding": ("embed", "mlp")}
        options = dict(kernel_metadata=dims, use_bias=False, rngs=rngs)
        self.dense = nnx.Linear(WIDTH, WIDTH, **options)
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate else None

    def __call__(self, x_BD):
        y_BD = jax.nn.gelu(self.dense(x_BD))
        return x_BD + (self.dropout(y_BD) if self.dropout else y_BD)


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x_BD):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        return x_BD + nn.Dense(WIDTH, use_bias=False, kernel_init=init)(x_BD)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x_BD):
        for number in range(4):
            x_BD = LinenLayer(name=f"layer_{number}")(x_BD)
        return x_BD


def batch():
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x)}


def num_traces(layout, layers="layers", rate=0.0, framework="nnx", **options):
    """The number of traces of the loss, until a step has run and kept its contract."""
    traced = []

    def loss(model, batch):
        traced.append(batch["x"].shape)
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    def make(rngs):
        return nnx.Sequential(*(Layer(rngs, rate) for _ in range(4)))

    if framework == "nnx":
        model = meshpar.from_nnx(make, loss, layers=layers)
    else:
        layers = layers and "layer_*"
        model = meshpar.from_linen(LinenNet(), loss, batch()["x"], layers=layers)
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    optimizer = optax.adam(1e-2)
    options = dict(devices=devices) | options
    program = meshpar.lower(model, optimizer, layout, batch(), **options)
    state = program.init()
    program.step(state, batch())
    assert program.violations() == [] and program.contract is not None
    return len(traced)


@pytest.mark.parametrize("framework", ["nnx", "linen"])
def test_a_model_without_layers_is_traced_once(framework):
    assert num_traces("data=2,fsdp=2", layers="", framework=framework) == 1


@pytest.mark.parametrize("framework", ["nnx", "linen"])
@pytest.mark.parametrize(
    "layout",
    [slow("fsdp=2"), slow("data=2,fsdp=2,tensor=2"), "data=2,fsdp=2,microbatches=2"],
)
def test_a_model_with_layers_is_traced_for_its_rows_and_for_its_step(layout, framework):
    assert num_traces(layout, framework=framework) == 4


@pytest.mark.parametrize("framework", ["nnx", slow("linen")])
@pytest.mark.parametrize(
    "layout",
    ["pipe=2,data=2,microbatches=4", slow("pipe=2,fsdp=2,tensor=2,microbatches=2")],
)
def test_a_pipeline_is_traced_once_more_for_its_evaluation(layout, framework):
    assert num_traces(layout, framework=framework) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, number", [("data=2,fsdp=2", 5), ("pipe=2,data=2,microbatches=4", 7)]
)
def test_evaluation_that_differs_from_training_is_traced_itself(layout, number):
    """Dropout makes it differ: it is cut, and checked for its rows in a pipeline."""
    assert num_traces(layout, rate=0.1) == number


def test_a_model_without_layers_in_parts_is_traced_for_its_rows():
    assert num_traces("data=2,fsdp=2", layers="", lowering="shard_map") == 4
