"""Models without layers under `lowering="shard_map"`: one head is all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.marks import slow
from support.tiny_models import host, relative_error

import meshpar
from meshpar import layouts

ROWS, DIM = 16, 8


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate=0.0, num=2, normalizes=False):
        named = {"kernel_metadata": {"out_sharding": ("embed", "mlp")}}
        bias = {"bias_metadata": {"out_sharding": ("mlp",)}}
        self.parts = nnx.List(
            nnx.Linear(DIM, DIM, rngs=rngs, **named, **bias) for _ in range(num)
        )
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.norm = nnx.BatchNorm(DIM, rngs=rngs) if normalizes else lambda x: x

    def __call__(self, x):
        for part in self.parts:
            x = self.norm(x + self.dropout(jnp.tanh(part(x))))
        return x


def batch():
    x = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    return {"x": x, "y": np.sin(x), "mask": np.arange(ROWS) % 3 > 0}


def errors(net, batch):
    return jnp.square(net(batch["x"]) - batch["y"]).mean(axis=-1)


def mean(net, batch):
    return errors(net, batch).mean(), {
        "largest": meshpar.metrics.Max(errors(net, batch).max())
    }


def masked(net, batch):
    mask = batch["mask"].astype(jnp.float32)
    return meshpar.metrics.Mean((errors(net, batch) * mask).sum(), mask.sum())


def spread(net, batch):
    return errors(net, batch).var()


def lower(layout, loss=mean, lowering="shard_map", **net):
    of = meshpar.from_nnx(lambda rngs: Net(rngs, **net), loss, layers=None)
    layout = layouts.parse(layout)
    options = {"devices": jax.devices()[: layout.num_devices], "lowering": lowering}
    return meshpar.lower(of, optax.adam(1e-2), layout, batch(), **options)


def first_step(program):
    metrics, gradients = program.gradients(program.init(0), batch())
    return host(metrics), host(gradients)


@pytest.mark.parametrize(
    "layout, loss, rate",
    [
        slow("fsdp=8", mean, 0.5),
        ("data=2,fsdp=4,microbatches=2", masked, 0.0),
        slow("data=8", masked, 0.5),
        slow("data=2,fsdp=4,zero=1", mean, 0.0),
    ],
)
def test_a_model_without_layers_trains_as_the_compiler_s_program(layout, loss, rate):
    ours = lower(layout, loss, rate=rate)
    assert ours.lowering.name == "shard_map" and ours.violations() == []
    assert not any(term.bound for term in ours.contract.terms if term.kind == "any")
    metrics, gradients = first_step(ours)
    microbatches = f"microbatches={ours.layout.microbatches}"
    want, want_gradients = first_step(lower(microbatches, loss, "jit", rate=rate))
    assert metrics.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5)
    assert relative_error(gradients, want_gradients) < 1e-5
    state, _ = ours.step(ours.init(0), batch())
    assert np.isfinite(ours.evaluate(state, batch())["loss"])


@pytest.mark.parametrize("layout", [slow("data=8"), slow("fsdp=8")])
def test_collectives_do_not_grow_where_a_compiler_combines_256(layout):
    few, many = (lower(layout, num=num) for num in (2, 140))
    kinds = [sorted((c.kind, c.axes) for c in p.collectives) for p in (few, many)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize(
    "layout, options, words",
    [
        ("tensor=8", {}, "tensor=8: this needs layers, and the model has no"),
        ("fsdp=8,remat=full", {}, "remat=full: this needs layers"),
        ("data=8", {"normalizes": True}, "changes norm/.* by the whole batch"),
        ("data=8", {"loss": spread}, "the loss is no mean over rows"),
    ],
)
def test_what_needs_layers_or_the_whole_batch_is_refused(layout, options, words):
    with pytest.raises(meshpar.LayoutError, match=words):
        lower(layout, **options)
