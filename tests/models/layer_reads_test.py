"""Losses read outputs of any layer and parameters of layers: a plain loop judges."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import equality
from support.marks import slow

import meshpar
from meshpar.errors import LayoutError, MeshparError

WIDTH = 8
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)
BATCH = {"x": X, "y": np.sin(X)}
BATCHES = [BATCH, {name: x[::-1] for name, x in BATCH.items()}]


def linear(*names, rngs):
    named = {"out_sharding": names}
    return nnx.Linear(WIDTH, WIDTH, kernel_metadata=named, rngs=rngs)


class Layer(nnx.Module):
    """Returns a penalty and integers beside its activations."""

    def __init__(self, rngs):
        self.up = linear("embed", "mlp", rngs=rngs)

    def __call__(self, x):
        y = jnp.tanh(self.up(x))
        return x + y, jnp.square(y).mean(), jnp.arange(3)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inp = linear("embed", None, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(4)])
        self.head = linear("embed", None, rngs=rngs)

    def __call__(self, x):
        """(outputs of all layers, their penalties, integers)."""
        hidden, penalties, integers = [self.inp(x)], [], []
        for layer in self.layers:
            x, penalty, own = layer(hidden[-1])
            hidden.append(x)
            penalties.append(penalty)
            integers.append(own)
        return hidden, penalties, integers


def squared(net, hidden, batch):
    return jnp.square(net.head(hidden) - batch["y"]).mean()


def last(net, batch):
    return squared(net, net(batch["x"])[0][-1], batch)


def deep_supervision(net, batch):
    return sum(squared(net, h, batch) for h in net(batch["x"])[0][1:])


def early_exit(net, batch):
    return squared(net, net(batch["x"])[0][2], batch)


def mean_of_all(net, batch):
    hidden = net(batch["x"])[0]
    return squared(net, sum(hidden) / len(hidden), batch)


def penalties_of_layers(net, batch):
    hidden, penalties, _ = net(batch["x"])
    return squared(net, hidden[-1], batch) + 0.1 * sum(penalties)


def sizes_of_activations(net, batch):
    hidden = net(batch["x"])[0]
    sizes = {f"layer_{i}": jnp.square(h).mean() for i, h in enumerate(hidden)}
    return squared(net, hidden[-1], batch) + 0.1 * sum(sizes.values()), sizes


def weights_of_all(net, batch):
    weights = jax.tree.leaves(nnx.state(net, nnx.Param))
    return last(net, batch) + 0.1 * sum(jnp.square(x).sum() for x in weights)


def weights_of_one(net, batch):
    kernel = net.layers[2].up.kernel[...]
    return last(net, batch) + 0.1 * jnp.abs(kernel).sum() * kernel.max()


LOSSES = {
    loss.__name__: loss
    for loss in (
        *(last, deep_supervision, early_exit, mean_of_all, penalties_of_layers),
        *(sizes_of_activations, weights_of_all, weights_of_one),
    )
}
LAYOUTS = {
    "data": "data=8",
    "fsdp": "fsdp=4,microbatches=2,remat=full,allow=bias",
    "tensor": "data=2,fsdp=2,tensor=2,zero=3,allow=bias",
    "pipe": "pipe=2,data=2,microbatches=4",
    "1f1b": "pipe=2,fsdp=2,microbatches=4,schedule=1f1b,allow=bias",
    "interleaved": "pipe=2,data=2,microbatches=4,virtual_stages=2,remat=full",
    "zero_bubble": "pipe=2,microbatches=4,schedule=zb_h1",
    "uneven": "pipe=3,microbatches=4",
}
DEFAULT = {
    ("penalties_of_layers", "fsdp"),
    ("weights_of_one", "1f1b"),
}


def lower(model, layout="data=8"):
    layout = meshpar.layouts.parse(layout)
    devices = jax.devices()[: layout.num_devices]
    optimizer = optax.sgd(0.1, momentum=0.9)
    return meshpar.lower(model, optimizer, layout, BATCH, devices=devices)


ROWS = [
    (loss, layout) if (loss, layout) in DEFAULT else slow(loss, layout)
    for loss in LOSSES
    for layout in LAYOUTS
]


@pytest.mark.parametrize("loss, layout", ROWS)
def test_a_loss_reads_what_it_wants_of_layers(loss, layout):
    model = meshpar.from_nnx(Net, LOSSES[loss], layers="layers")
    program = lower(model, LAYOUTS[layout])
    report = equality.compare(program, None, BATCHES)
    assert report.ok, report
    assert program.lowering.name == "shard_map"


class Block(nn.Module):
    """As `nn.scan` wants it, with a penalty."""

    @nn.compact
    def __call__(self, x, _=None):
        y = jnp.tanh(nn.Dense(WIDTH)(x))
        return x + y, jnp.square(y).mean()


class LinenNet(nn.Module):
    scan: bool = False

    @nn.compact
    def __call__(self, x):
        if self.scan:
            split = {"params": True}
            stack = nn.scan(
                Block, variable_axes={"params": 0}, split_rngs=split, length=4
            )
            return stack(name="block")(x, None)
        penalties = []
        for i in range(4):
            x, penalty = Block(name=f"block_{i}")(x)
            penalties.append(penalty)
        return x, jnp.stack(penalties)


def linen_loss(apply, batch):
    x, penalties = apply(batch["x"])
    return jnp.square(x - batch["y"]).mean() + 0.1 * penalties.sum()


def weights_of_blocks(apply, batch):
    weights = jax.tree.leaves(apply.variables["params"])
    return linen_loss(apply, batch) + sum(jnp.square(x).sum() for x in weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    "scan, loss",
    [slow(False, weights_of_blocks), (True, linen_loss)],
    ids=["loop", "scan"],
)
def test_a_loss_of_a_linen_module_reads_what_it_wants(scan, loss):
    layers = "block" if scan else "block_*"
    model = meshpar.from_linen(LinenNet(scan), loss, X[:1], layers=layers)
    report = equality.compare(
        lower(model, "pipe=2,data=2,microbatches=4"), None, BATCHES
    )
    assert report.ok, report


def sum_of_one(net, batch):
    hidden = net(batch["x"])[0]
    return squared(net, hidden[-1], batch) + jnp.square(hidden[2]).sum()


def chosen_by_one(net, batch):
    hidden = net(batch["x"])[0]
    return squared(net, hidden[-1], batch) * jnp.where(hidden[2].mean() > 0, 3.0, 1.0)


def counted_rows_of_one(net, batch):
    hidden = net(batch["x"])[0]
    numbers = jnp.arange(len(hidden[2]))[:, None]
    return squared(net, hidden[-1], batch) + (hidden[2] * numbers).mean()


@pytest.mark.parametrize(
    "loss, cause",
    [
        (sum_of_one, "a sum over rows, a mean over rows"),
        (chosen_by_one, "a number computed from all rows chooses"),
        (counted_rows_of_one, "it counts rows of the batch"),
    ],
)
def test_what_parts_of_a_batch_cannot_give_is_refused_of_any_layer(loss, cause):
    model = meshpar.from_nnx(Net, loss, layers="layers")
    with pytest.raises(LayoutError, match=cause):
        lower(model)


@pytest.mark.parametrize("loss", [slow(deep_supervision), weights_of_all])
def test_without_layers_they_train(loss):
    report = equality.compare(lower(meshpar.from_nnx(Net, loss)), None, BATCHES)
    assert report.ok, report


def test_a_head_refuses_activations_of_another_loss():
    """They hold other values of layers than the head reads."""
    one, other = (
        meshpar.from_nnx(Net, loss, layers="layers") for loss in (last, early_exit)
    )
    params, key = one.init(jax.random.key(0)), jax.random.key(1)
    shared = one.layered.split(params)[0]
    x = one.layered.embed(shared, BATCH, key)
    with pytest.raises(MeshparError, match="reads other values of layers"):
        other.layered.head_loss(shared, x, BATCH, key)


def test_prints_of_a_loss_run_once(capfd):
    def loss(net, batch):
        jax.debug.print("before {}", batch["x"].shape[0])
        hidden = net(batch["x"])[0]
        jax.debug.print("between {}", hidden[2].mean())
        return squared(net, hidden[-1], batch)

    program = lower(meshpar.from_nnx(Net, loss, layers="layers"), "data=1")
    program.step(program.init(), BATCH)
    jax.effects_barrier()
    printed = capfd.readouterr().out
    assert [printed.count(word) for word in ("before 16", "between")] == [1, 1]


def test_weights_that_a_module_stacks_are_refused():
    model = meshpar.from_linen(LinenNet(True), weights_of_blocks, X[:1], layers="block")
    with pytest.raises(MeshparError, match="Dense_0/bias of all layers that nn.scan"):
        lower(model)


def test_evaluation_reads_what_it_wants():
    model = meshpar.from_nnx(Net, last, early_exit, layers="layers")
    report = equality.compare(lower(model), None, BATCHES)
    assert report.ok, report


def whole_weights(net, batch):
    first, other = (net.layers[i].up.kernel[...] for i in (0, 1))
    return last(net, batch) + jnp.square(first @ other).sum()


def integers_of_layers(net, batch):
    hidden, _, integers = net(batch["x"])
    return squared(net, hidden[-1], batch) + hidden[-1][:, integers[0]].mean()


def weights_before_layers(net, batch):
    x = batch["x"] @ net.layers[1].up.kernel[...]
    return squared(net, net(x)[0][-1], batch)


@pytest.mark.parametrize(
    "loss, message",
    [
        (whole_weights, r"reads the parameter up/kernel of layer 0 of 'layers'.*:\d+"),
        (integers_of_layers, r"reads int32\[3.* of layer 0 of 'layers'"),
        (weights_before_layers, "depends on the parameter up/kernel of layer 1"),
    ],
)
def test_what_cannot_travel_with_activations_is_refused(loss, message):
    few = {name: x[:2] for name, x in BATCH.items()}
    model = meshpar.from_nnx(Net, loss, layers="layers")
    with pytest.raises(MeshparError, match=message + ".*layers=''"):
        devices = jax.devices()[:1]
        meshpar.lower(model, optax.sgd(0.1), "data=1", few, devices=devices)


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
    class Dropping(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.drop = nnx.Dropout(0.5, deterministic=True, rngs=rngs)

        def __call__(self, x):
            return x + self.drop(jnp.tanh(self.up(x)))

    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Dropping(rngs) for _ in range(4)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    net = Stack(nnx.Rngs(0))
    program = lower(meshpar.from_nnx(Stack, plain_loss, layers="layers"))
    _, metrics = program.step(program.init(params=net), BATCH)
    np.testing.assert_allclose(metrics["loss"], plain_loss(net, BATCH), rtol=1e-5)
