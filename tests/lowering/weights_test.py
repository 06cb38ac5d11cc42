"""Losses with weights, and metrics of every kind: the same under all layouts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.equality import first_step
from support.marks import slow
from support.tiny_models import host, relative_error

import meshpar

ROWS, WIDTH = 16, 8

LAYOUTS = (
    "data=1,microbatches=4",
    "data=8",
    "fsdp=8",
    "data=2,fsdp=2,microbatches=4",
    "pipe=2,microbatches=8",
    "pipe=2,data=2,microbatches=4,virtual_stages=2",
)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(
            rngs.params.normal((WIDTH, WIDTH)) / 3, out_sharding=("embed", None)
        )

    def __call__(self, x_BD):
        return x_BD + jnp.tanh(x_BD @ self.w[...])


class Net(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=4)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def layers(rngs):
            return Layer(rngs)

        self.layers = layers(rngs)
        self.head = nnx.Param(rngs.params.normal((WIDTH,)), out_sharding=("embed",))


def errors(net, x_BD, batch):
    return batch["mask"] * (x_BD @ net.head[...] - batch["y"]) ** 2


def metrics(error_B, batch):
    """One metric of every kind; each shows a wrong kind by its value."""
    wrong = (error_B > 1).astype(jnp.float32)
    return {
        "wrong": meshpar.metrics.Mean(
            (wrong * batch["other"]).sum(), batch["other"].sum()
        ),
        "tokens": meshpar.metrics.Sum(batch["mask"].sum()),
        "largest": meshpar.metrics.Max(error_B.max()),
        "lowest": meshpar.metrics.Max((-1 - batch["mask"]).max()),
        "final": meshpar.metrics.Last(batch["y"][-1]),
    }


def divided_by_the_user(net, x_BD, batch):
    """Not a number where the mask is 0."""
    error_B, count = errors(net, x_BD, batch), batch["mask"].sum()
    error = error_B.sum() / count
    return error, {"weight": count, "error": error, **metrics(error_B, batch)}


def as_a_mean(net, x_BD, batch):
    error_B = errors(net, x_BD, batch)
    mean = meshpar.metrics.Mean(error_B.sum(), batch["mask"].sum())
    guarded = error_B.sum() / jnp.maximum(batch["mask"].sum(), 1)
    return mean, {"error": guarded, **metrics(error_B, batch)}


@functools.cache
def model(head_loss):
    stack = meshpar.LayerStack(
        stack="layers",
        embed=lambda net, batch: batch["x"],
        layer=lambda layer, x: layer(x),
        head_loss=head_loss,
    )
    return meshpar.from_nnx(Net, stack)


def rows(masked=4):
    """Rows of very different weights; the first `masked` ones have none."""
    random = np.random.default_rng(0)
    mask = random.choice([1, 2, 30], ROWS).astype(np.float32)
    mask[:masked] = 0
    mask[::4] = 0  # A whole microbatch of four.
    return {
        "x": random.normal(size=(ROWS, WIDTH)).astype(np.float32),
        "y": random.normal(size=ROWS).astype(np.float32),
        "mask": mask,
        "other": random.choice([0, 1, 5], ROWS).astype(np.float32),
    }


def lower(head_loss, layout, data=None, **options):
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    options = {"optimizer": optax.sgd(0.1), "devices": devices} | options
    return meshpar.lower(
        model(head_loss), layout=layout, batch=data or rows(), **options
    )


@functools.cache
def expected():
    """Metrics and gradients, without a program."""
    data = {name: jnp.asarray(x) for name, x in rows().items()}

    def loss(params):
        x_BD = data["x"]
        for w_DD in params["layers/w"]:
            x_BD = x_BD + jnp.tanh(x_BD @ w_DD)
        error_B = data["mask"] * (x_BD @ params["head"] - data["y"]) ** 2
        return error_B.sum() / data["mask"].sum(), error_B

    params = model(as_a_mean).init(jax.random.key(0))
    (value, error_B), grads = jax.value_and_grad(loss, has_aux=True)(params)
    other = data["other"].sum()
    numbers = {
        "loss": value,
        "error": value,
        "weight": data["mask"].sum(),
        "wrong": ((error_B > 1) * data["other"]).sum() / other,
        "wrong/weight": other,
        "tokens": data["mask"].sum(),
        "largest": error_B.max(),
        "lowest": -1.0,
        "final": data["y"][-1],
    }
    return host(numbers), host(grads)


def assert_equal(found, want):
    assert found.keys() == want.keys()
    for name, value in want.items():
        assert found[name] == pytest.approx(value, rel=1e-5), name


def head_losses_and(values, default):
    """Both losses with all values; by default means have the last of `default`."""

    def cases(head_loss, default):
        return [
            (pytest.param if value in default else slow)(head_loss, *value)
            for value in values
        ]

    return cases(divided_by_the_user, default[:-1]) + cases(as_a_mean, default[-1:])


@pytest.mark.parametrize(
    "head_loss, layout",
    head_losses_and([(x,) for x in LAYOUTS], [(LAYOUTS[3],)]),
)
def test_a_weighted_loss_and_its_metrics_do_not_depend_on_the_layout(head_loss, layout):
    momentum, (want, want_grads) = optax.sgd(0.1, momentum=0.9), expected()
    program = lower(head_loss, layout, optimizer=momentum)
    found, grads = first_step(program, rows())
    found.pop("grad_norm")
    assert_equal(found, want)
    assert relative_error(grads, want_grads) < 1e-5
    if program.layer_order is not None:  # `gradients` puts the layers in order itself.
        found, grads = host(program.gradients(program.init(0), rows()))
        assert_equal(found, want)
        assert relative_error(grads, want_grads) < 1e-5
    assert_equal(host(program.evaluate(program.init(0), rows())), want)
    assert program.violations() == []


@pytest.mark.parametrize(
    "head_loss, microbatches", head_losses_and([(1,), (4,)], [(4,)])
)
def test_a_weighted_loss_under_jit(head_loss, microbatches):
    layout = f"fsdp=2,microbatches={microbatches}"
    program, (want, want_grads) = lower(head_loss, layout, lowering="jit"), expected()
    found, grads = host(program.gradients(program.init(0), rows()))
    assert_equal(found, want)
    assert relative_error(grads, want_grads) < 1e-5


OF_WEIGHT_0 = [
    ("data=1", "jit"),
    ("data=1,microbatches=2", "jit"),
    ("fsdp=2", ""),
    ("pipe=2,microbatches=2", ""),
    ("pipe=2,microbatches=2,schedule=pipedream", ""),
]


@pytest.mark.parametrize(
    "head_loss, layout, lowering", head_losses_and(OF_WEIGHT_0, OF_WEIGHT_0[::2])
)
def test_a_batch_of_weight_0_changes_nothing(head_loss, layout, lowering):
    data = rows(masked=ROWS)
    program = lower(head_loss, layout, data, lowering=lowering)
    state = program.init(0)
    before, evaluated = host(state.params), host(program.evaluate(state, data))
    state, stepped = program.step(state, data)
    for found in (evaluated, host(stepped)):
        assert found["loss"] == found["error"] == found["weight"] == 0
    assert stepped["grad_norm"] == 0
    jax.tree.map(np.testing.assert_array_equal, host(state.params), before)


@pytest.mark.parametrize("lowering", ["", slow("jit")])
def test_a_replica_without_a_token_weighs_nothing(lowering):
    """Rows 0 to 7 are those of the first replica."""
    data = rows(masked=8)
    program = lower(
        divided_by_the_user,
        "replica=2,fsdp=2",
        data,
        mode=meshpar.LocalSGD(period=1),
        lowering=lowering,
    )
    state, found = program.step(program.init(0), data)
    second = {name: x[8:] for name, x in data.items()}
    alone = lower(divided_by_the_user, "data=1", second)
    one_state, want = host(alone.step(alone.init(0), second))
    for name in ("loss", "error", "tokens", "weight", "largest", "lowest", "final"):
        assert found[name] == pytest.approx(want[name], rel=1e-5), name
    other = data["other"]
    assert found["wrong/weight"] == other.sum() > other[8:].sum()
    # The first replica stays where it began, and the two are averaged.
    begin = alone.init(0).params
    middle = {path: (x + begin[path]) / 2 for path, x in one_state.params.items()}
    averaged = host(program.weights(state))
    assert relative_error(averaged, middle) < 1e-5
    whole = lower(divided_by_the_user, "data=1", data)
    params = jax.tree.map(jnp.asarray, averaged)
    evaluated = host(program.evaluate(state, data))
    for name, value in host(whole.evaluate_params(params, data)).items():
        assert evaluated[name] == pytest.approx(value, rel=1e-5), name


class Words(nnx.Module):
    """Embedding and tied head over 64 tokens, which all stages share."""

    def __init__(self, rngs):
        self.table = nnx.Param(
            rngs.params.normal((64, WIDTH)), out_sharding=("vocab", None)
        )

        @nnx.split_rngs(splits=2)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def layers(rngs):
            return Layer(rngs)

        self.layers = layers(rngs)


def masked_tokens(net, x_BLD, batch):
    logits_BLV = jnp.einsum("BLD,VD->BLV", x_BLD, net.table[...])
    losses_BL = meshpar.ops.vocabulary.token_losses(logits_BLV, batch["targets"])
    total, count = (losses_BL * batch["mask"]).sum(), batch["mask"].sum()
    return total / count, {
        "weight": count,
        "largest": meshpar.metrics.Max(losses_BL.max()),
    }


@pytest.mark.slow
def test_a_masked_loss_runs_with_a_split_vocabulary():
    stack = meshpar.LayerStack(
        stack="layers",
        embed=lambda net, batch: meshpar.ops.vocabulary.lookup(
            net.table[...], batch["tokens"]
        ),
        layer=lambda layer, x: layer(x),
        head_loss=masked_tokens,
    )
    words, random = meshpar.from_nnx(Words, stack), np.random.default_rng(0)
    ids = random.integers(0, 64, (2, 8, 4), np.int32)
    mask = random.choice([0, 1, 5], (8, 4)).astype(np.float32)
    mask[::4] = 0  # The first microbatch.
    data, results = {"tokens": ids[0], "targets": ids[1], "mask": mask}, []
    for layout in ("data=1", "pipe=2,microbatches=4,vocab=pipe"):
        devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
        program = meshpar.lower(words, optax.sgd(0.1), layout, data, devices=devices)
        results.append(host(program.gradients(program.init(0), data)))
        assert program.violations() == []
    (want, want_grads), (found, grads) = results
    assert_equal(found, want)
    assert relative_error(grads, want_grads) < 1e-5
