"""Metrics over an epoch: each by its kind and its weight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import meshpar
from meshpar.errors import MeshparError


class Line(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones((4,)), out_sharding=("embed",))


def loss(module, batch):
    error_B = jnp.abs(batch["x"] @ module.w[...])
    mask = batch["mask"]
    return meshpar.metrics.Mean((mask * error_B).sum(), mask.sum()), {
        "wrong": meshpar.metrics.Mean(
            (error_B > 1).astype(jnp.float32).sum(), mask.size
        ),
        "tokens": meshpar.metrics.Sum(mask.sum()),
        "largest": meshpar.metrics.Max(error_B.max()),
        "final": meshpar.metrics.Last(error_B[-1]),
    }


def batches():
    random, masks = np.random.default_rng(0), ([1] * 8, [0] * 8, [0] * 7 + [20])
    for mask in masks:
        x = random.normal(size=(8, 4)).astype(np.float32)
        yield {"x": x, "mask": np.array(mask, np.float32)}


@functools.cache
def program():
    (first, *_) = batches()
    model = meshpar.from_nnx(Line, loss)
    devices = jax.devices()[:2]
    return meshpar.lower(model, optax.sgd(0.0), "data=2", first, devices=devices)


@pytest.mark.parametrize("trains", [True, False])
def test_batches_of_unequal_weight_are_added_up_by_kind(trains):
    sums, state = program().metric_sums(), program().init(0)
    for batch in batches():
        if trains:
            state, metrics = program().step(state, batch)
        else:
            metrics = program().evaluate(state, batch)
        sums.add(metrics)
    errors = np.stack([np.abs(batch["x"].sum(1)) for batch in batches()])
    masks = np.stack([batch["mask"] for batch in batches()])
    found, want = sums.result(), (errors * masks).sum() / masks.sum()
    assert found["loss"] == pytest.approx(want, rel=1e-6)
    assert found["weight"] == found["tokens"] == masks.sum()
    assert found["wrong"] == pytest.approx((errors > 1).mean())
    assert found["wrong/weight"] == errors.size
    assert found["largest"] == pytest.approx(errors.max())
    assert found["final"] == pytest.approx(errors[-1, -1])
    assert sums.result() == found


def test_plain_metrics_are_means():
    sums = meshpar.metrics.MetricSums()
    assert sums.result() == {}
    for value in (1.0, 3.0):
        sums.add({"loss": value})
    assert sums.result() == {"loss": 2.0}
    sums.add({"loss": jnp.float32(8)})
    assert sums.result() == {"loss": 4.0}


def test_a_weight_of_0_gives_a_loss_of_0():
    sums = meshpar.metrics.MetricSums()
    sums.add({"loss": 0.0, "weight": 0.0})
    assert sums.result() == {"loss": 0.0, "weight": 0.0}


def test_a_metric_has_one_kind():
    def other(module, batch):
        return loss(module, batch)[0], {
            "tokens": meshpar.metrics.Max(batch["mask"].max())
        }

    (first, *_) = batches()
    model = meshpar.from_nnx(Line, loss, other)
    one = jax.devices()[:1]
    of_two = meshpar.lower(model, optax.sgd(0.0), "data=1", first, devices=one)
    with pytest.raises(MeshparError, match="tokens.*Sum in training.*Max in eval"):
        of_two.metric_sums()
