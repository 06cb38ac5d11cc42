"""Faults planted in our own code are found, by the values or by the contract."""

import functools

import jax
import jax.numpy as jnp
import pytest
from support import tiny_stack

from meshpar.collectives.transport import Transport
from meshpar.explain.verify import record, verify
from meshpar.lowering import shard_map
from meshpar.lowering.shard_map import ShardMapLowering

BATCHES = [tiny_stack.batch()]
CLIP = 0.1


def lowered(layout, clip_norm=CLIP):
    return tiny_stack.lower(layout, clip_norm=clip_norm)


@functools.cache
def one_device():
    return list(record(lowered("data=1"), BATCHES))


@pytest.fixture(autouse=True)
def reference_without_faults():
    one_device()


def checked(layout, **options):
    return verify(lowered(layout, **options), one_device(), BATCHES)


def kinds(report):
    """Kinds of tensors that differ."""
    return {c.kind for c in report.comparisons if not c.ok}


def test_without_a_fault_all_is_well():
    report = checked("data=2,fsdp=2")
    assert report.ok and report.problem == ""
    found = {c.kind for c in report.comparisons}
    assert found == {
        *("evaluation", "loss", "gradient", "grad_norm", "metric", "optimizer")
    }


def test_a_scaled_gradient(monkeypatch):
    gradients = ShardMapLowering.gradients

    def scaled(self, state, batch):
        found = gradients(self, state, batch)
        head = found.gradients["head"] * 1.001
        return found._replace(gradients=found.gradients | {"head": head})

    monkeypatch.setattr(ShardMapLowering, "gradients", scaled)
    first = checked("data=2").first_difference
    assert (first.kind, first.tensor) == ("gradient", "head")
    assert first.error == pytest.approx(1e-3, rel=0.01)


def test_a_dropped_reduction(monkeypatch):
    """Without jax's check of types, the devices would train apart."""
    mapped = functools.partial(jax.shard_map, check_vma=False)
    monkeypatch.setattr(jax, "shard_map", mapped)
    monkeypatch.setattr(shard_map, "all_reduce_grads", lambda grads, shardings: grads)
    report = checked("data=2")
    assert kinds(report) >= {"gradient", "grad_norm", "optimizer"}
    assert any("all_reduce over data" in line for line in report.violations)


def test_a_scaled_evaluation(monkeypatch):
    evaluate = ShardMapLowering.evaluate

    def scaled(self, params, batch):
        totals = evaluate(self, params, batch)
        return totals.with_mean("loss", 1.5 * totals.reported()["loss"])

    monkeypatch.setattr(ShardMapLowering, "evaluate", scaled)
    report = checked("fsdp=2")
    assert kinds(report) == {"evaluation"} and report.violations == ()
    assert report.first_difference.tensor == "loss"
    assert report.first_difference.error == pytest.approx(0.5, rel=1e-4)


def test_weights_that_travel_in_bfloat16(monkeypatch):
    gather = Transport.all_gather

    def rounded(self, x, axes, dim):
        narrow = jax.lax.reduce_precision(x, 8, 7).astype(jnp.bfloat16)
        return gather(self, narrow, axes, dim).astype(x.dtype)

    monkeypatch.setattr(Transport, "all_gather", rounded)
    report = checked("fsdp=2")
    assert kinds(report) >= {"loss", "gradient", "optimizer"}


def test_a_clip_at_another_norm():
    report = checked("data=2", clip_norm=1.01 * CLIP)
    assert kinds(report) == {"optimizer"} and report.violations == ()


def test_a_lost_weight_of_tokens(monkeypatch):
    """Every part of the batch counts the same, whatever the tokens that it holds."""
    monkeypatch.setattr(tiny_stack, "weight", lambda batch: jnp.float32(1))
    report = checked("data=2")
    assert kinds(report) >= {"evaluation", "loss", "gradient", "metric"}
