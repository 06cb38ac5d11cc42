"""Metrics that are arrays: the same under every layout as over the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.classifier import CLASSES, ROWS, Net
from support.marks import slow

import meshpar
from meshpar.errors import LayoutError
from meshpar.metrics import Max, Mean, Sum


def numbers(logits, labels):
    """Metrics of whole batches: by class, and of pairs of classes."""
    of_class = jax.nn.one_hot(labels, CLASSES)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    guessed = jax.nn.one_hot(logits.argmax(-1), CLASSES)
    return losses, {
        "loss_by_class": Mean((losses[:, None] * of_class).sum(0), of_class.sum(0)),
        "confusion": Sum(jnp.einsum("bi,bj->ij", of_class, guessed)),
        "largest": Max(logits.max(0)),
        "mean_logits": logits.mean(0),
        "rows": Sum(of_class.sum()),
    }


def loss(model, batch):
    losses, metrics = numbers(model(batch["x"]), batch["y"])
    return losses.mean(), metrics


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, CLASSES - 1, ROWS)}  # One class is empty.


def plain(model, params, batch):
    """The metrics of whole batches, without meshpar's kinds."""
    _, found = numbers(model.bind(params)(batch["x"]), batch["y"])
    by_class = found.pop("loss_by_class")
    count = np.maximum(by_class.weight, 1)
    found["loss_by_class/weight"] = by_class.weight
    found["loss_by_class"] = by_class.total / count
    return {
        k: np.asarray(x[0] if isinstance(x, tuple) else x) for k, x in found.items()
    }


@pytest.mark.parametrize(
    "layout, lowering",
    [
        slow("data=1", ""),
        slow("data=2,fsdp=2", ""),
        slow("fsdp=2,microbatches=2", "jit"),
        slow("pipe=2,data=2,microbatches=2", ""),
        ("data=4", "shard_map"),
    ],
)
def test_arrays_are_those_of_the_whole_batch(layout, lowering):
    named = {"layers": "layers"} if lowering != "shard_map" else {}
    model = meshpar.from_nnx(Net, loss, **named)
    devices = jax.devices()[: meshpar.layouts.parse(layout).num_devices]
    program = meshpar.lower(
        model, optax.sgd(0.1), layout, arrays(), devices=devices, lowering=lowering
    )
    state = program.init(0)
    expected = plain(program.model, jax.device_get(state.params), arrays())
    evaluated = program.evaluate(state, arrays())
    state, stepped = program.step(state, arrays())
    for metrics in (evaluated, stepped):
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-6)
    assert program.violations() == []


def test_sums_over_batches_are_by_entry():
    model = meshpar.from_nnx(Net, loss)
    program = meshpar.lower(model, optax.sgd(0.1), "data=8", arrays())
    params = program.init_params(0)
    sums, each = program.metric_sums(), []
    for seed in (0, 1):
        sums.add(program.evaluate_params(params, arrays(seed)))
        each.append(plain(program.model, jax.device_get(params), arrays(seed)))
    found, (first, second) = sums.result(), each
    np.testing.assert_allclose(
        found["confusion"], first["confusion"] + second["confusion"]
    )
    weights = [x["loss_by_class/weight"] for x in each]
    total = sum(x["loss_by_class"] * w for x, w in zip(each, weights, strict=True))
    mean = total / np.maximum(sum(weights), 1)
    np.testing.assert_allclose(found["loss_by_class"], mean, rtol=1e-5)
    assert found["loss_by_class"][CLASSES - 1] == 0  # Of no row.
    assert found["rows"] == 2 * ROWS and isinstance(found["rows"], float)


def test_values_by_row_are_no_metric_of_parts():
    def by_row(model, batch):
        losses, _ = numbers(model(batch["x"]), batch["y"])
        return losses.mean(), {"losses": Max(losses)}

    model = meshpar.from_nnx(Net, by_row, layers="layers")
    with pytest.raises(LayoutError, match="has a dim for the rows of the batch"):
        meshpar.lower(model, optax.sgd(0.1), "data=8", arrays())
