"""Evaluation of batches of any number of rows equals a plain loop over these rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import regression, tiny_models
from support.classifier import CLASSES, ROWS, Net
from support.marks import slow

import meshpar
from meshpar.errors import MeshparError
from meshpar.metrics import Max, Mean, Sum, loss_result


def numbers(logits, batch):
    of_class = jax.nn.one_hot(batch["y"], CLASSES)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    guessed = jax.nn.one_hot(logits.argmax(-1), CLASSES)
    return losses, {
        "by_class": Mean((losses[:, None] * of_class).sum(0), of_class.sum(0)),
        "confusion": Sum(jnp.einsum("bi,bj->ij", of_class, guessed)),
        "largest": Max(logits.max(0)),
    }


def mean_loss(model, batch):
    logits = model(batch["x"])
    losses, metrics = numbers(logits, batch)
    return losses.mean(), metrics | {"mean_logits": logits.mean(0)}


def weighted_loss(model, batch):
    losses, metrics = numbers(model(batch["x"]), batch)
    weight = batch["weight"]
    return Mean((losses * weight).sum(), weight.sum()), metrics


def arrays(rows, seed=0):
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=(rows, 4)).astype(np.float32),
        "y": random.integers(0, CLASSES - 1, rows),  # One class is empty.
        "weight": random.integers(0, 9, rows).astype(np.float32),
    }


def part(batch, start, stop):
    return {name: x[start:stop] for name, x in batch.items()}


@functools.cache
def lowered(loss, layout, lowering=""):
    named = {} if lowering else {"layers": "layers"}
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    return meshpar.lower(
        meshpar.from_nnx(Net, loss, **named),
        optax.sgd(0.1),
        layout,
        arrays(ROWS),
        devices=devices,
        lowering=lowering,
    )


def plain(model, loss, batch):
    """The metrics of all rows together, on one device."""
    result = loss_result(loss(model, batch))
    found = {"loss": result.loss}
    for name, x in result.metrics.items():
        if isinstance(x, Mean):
            x = (x.total / np.maximum(x.weight, 1),)
        found[name] = x[0] if isinstance(x, tuple) else x
    return found


@pytest.mark.parametrize(
    "loss, layout, lowering",
    [
        slow(mean_loss, "data=2,fsdp=4", ""),
        slow(weighted_loss, "pipe=2,data=2,microbatches=2", ""),
        slow(mean_loss, "pipe=2,fsdp=2,microbatches=4", ""),
        (weighted_loss, "data=4", "jit"),
        slow(mean_loss, "data=4", "shard_map"),
        slow(weighted_loss, "fsdp=2,microbatches=4", ""),
        slow(mean_loss, "pipe=2,data=2,microbatches=2,virtual_stages=1", ""),
    ],
)
def test_metrics_of_all_rows_are_those_of_a_plain_loop(loss, layout, lowering):
    """Batches of 16, 16, 10 and 1 rows: sums, means, maxima, and arrays of them."""
    program, rows = lowered(loss, layout, lowering), arrays(43, 1)
    state, sums = program.init(0), program.metric_sums()
    for start, stop in ((0, 16), (16, 32), (32, 42), (42, 43)):
        sums.add(program.evaluate(state, part(rows, start, stop)))
    found, model = sums.result(), Net(nnx.Rngs(0))
    model = program.update(model, state)
    for name, want in plain(model, loss, rows).items():
        np.testing.assert_allclose(found[name], want, rtol=1e-5, atol=1e-6)
    own = rows["weight"].sum() if loss is weighted_loss else 43
    assert found["weight"] == own
    assert found["confusion"].sum() == 43


def contrast(model, batch):
    """Each row against all others of the batch, and a statistic of the batch."""
    z = model(batch["x"])
    z = (z - z.mean(0, keepdims=True)) / (z.std(0, keepdims=True) + 0.1)
    labels = jnp.arange(len(z))
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, labels).mean()


@pytest.mark.parametrize("rows", [slow(1), 10, 12, 20])
def test_rows_that_are_mixed_are_mixed_with_each_other_alone(rows):
    program = lowered(contrast, "data=2,fsdp=2", "jit")
    state, batch = program.init(0), arrays(rows, 2)
    model = program.update(Net(nnx.Rngs(0)), state)
    found = program.evaluate(state, batch)["loss"]
    want = nnx.jit(contrast)(model, batch)
    assert float(found) == pytest.approx(float(want), rel=1e-5)


DECODERS = [
    slow("fsdp=2,context=2,tensor=2", {}),
    ("pipe=2,fsdp=2,context=2,microbatches=2,vocab=pipe", {}),
    slow("pipe=2,microbatches=4,virtual_stages=2", {"depth": 4}),
    slow("pipe=2,microbatches=2,partition=1/2", {"depth": 3}),
    slow("data=2,context=4,context_mode=ring", {}),
    slow("fsdp=2,expert=2,tensor=2", {"num_experts": 4}),
    slow("pipe=2,expert=2,microbatches=2", {"num_experts": 4}),
    slow("data=2,tensor=2,layers=fsdp", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout, sizes", DECODERS)
def test_decoders_evaluate_any_rows_under_any_layout(layout, sizes):
    program = tiny_models.lower(layout, tiny_models.model(**sizes))
    state = program.init(0)
    weights = jax.device_get(program.weights(state))
    loss = jax.jit(lambda w, batch: program.model.plain.loss(w, batch, None)[0])
    for rows in (1, 6):
        batch = tiny_models.batch(3, rows)
        want = loss_result(loss(weights, batch)).loss
        found = program.evaluate(state, batch)["loss"]
        assert float(found) == pytest.approx(float(want), rel=2e-5)


def test_replicas_that_train_apart_evaluate_any_rows():
    mode = meshpar.LocalSGD(period=2)
    program = regression.lower("replica=2,data=2", optax.sgd(0.1), mode=mode)
    state, batch = program.init(0), regression.rows(5)
    module = program.model.bind(jax.device_get(program.weights(state)))
    for rows in (5, 16):
        own = part(batch, 0, rows)
        found = program.evaluate(state, own)
        want = regression.loss(module, own)
        assert float(found["loss"]) == pytest.approx(float(want), rel=1e-5)
        assert found["weight"] == rows and found["drift"] == 0
    with pytest.raises(meshpar.MeshparError, match="use evaluate.state, batch."):
        program.evaluate_params(program.evaluated_params(state), batch)


def test_processes_say_how_many_rows_a_batch_has(monkeypatch):
    """A process that holds a part of the rows cannot know the number of all."""
    program = lowered(mean_loss, "data=4", "jit")
    np.testing.assert_array_equal(program.rows_of(10), np.arange(10))
    half = type(program.batches)(program.batches.abstract)
    half.__dict__["rows"] = np.arange(8)
    monkeypatch.setitem(program.__dict__, "batches", half)
    with pytest.raises(MeshparError, match="3 rows on this process, which holds 8 of"):
        program.evaluate(program.init(0), arrays(3))


def test_a_batch_without_rows_is_refused():
    program = lowered(mean_loss, "data=4", "jit")
    with pytest.raises(MeshparError, match="a batch of 0 rows: give at least one"):
        program.evaluate(program.init(0), arrays(0))
