"""The collectives, bytes and memory that local SGD declares."""

import dataclasses

import jax
import numpy as np
import pytest
from support import tiny_models
from support.marks import slow
from support.regression import ADAM, NESTEROV, SGD, lower, rows

import meshpar
from meshpar.local_sgd.exchange import make_exchange


@pytest.mark.parametrize(
    "options, ratio",
    [
        slow(dict(), 1),
        slow(dict(staleness=3), 1),
        slow(dict(wire="bf16"), 1 / 2),
        slow(dict(wire="int8"), 1 / 4),
        (dict(wire="int4", staleness=2, fragments=2), 1 / 8),
    ],
)
def test_bytes_are_those_of_synchronous_training_over_the_period(options, ratio):
    """Per device, over whole periods; quantized wires also send their scales."""
    period = 8
    mode = meshpar.LocalSGD(period, **options)
    program = lower("replica=4,fsdp=2", ADAM, mode=mode)
    state, sent = program.init(0), 0.0
    for step in range(2 * period + 3):
        state, metrics = program.step(state, rows(step))
        sent += metrics["replica_bytes"]
        if options.get("staleness") is None and (step + 1) % period:
            assert metrics["replica_bytes"] == 0
    fragments = program.exchange.fragments
    padded = fragments.fragment_size * mode.fragments
    shards = sum(np.prod(shape) for shape in fragments.shapes.values())
    assert padded - shards < 4 * 4 * 256 * mode.fragments
    synchronous = 2 * 4 * padded * 3 / 4
    per_step = sent / (2 * period)
    assert per_step == pytest.approx(synchronous / period * ratio, rel=0.1)
    assert program.violations() == []


def test_a_wrong_contract_fails(monkeypatch):
    mode = meshpar.LocalSGD(4, staleness=2, wire="int8")
    program = lower("replica=4", SGD, mode=mode)
    assert (
        program.violations() == [] and len(program.steps.exchange.transfer_kinds) == 2
    )
    terms = type(program.exchange).terms

    def smaller(self, *args):
        return tuple(
            dataclasses.replace(term, payload_bytes=term.payload_bytes - 4)
            for term in terms(self, *args)
        )

    monkeypatch.setattr(type(program.exchange), "terms", smaller)
    lines = "\n".join(program.violations())
    assert "all_to_all over replica" in lines and "all_gather over replica" in lines
    monkeypatch.setattr(type(program.exchange), "terms", lambda *_: ())
    assert "none declared" in program.violations()[0]
    at_once = lower("replica=4", SGD, mode=meshpar.LocalSGD(4, wire="int8"))
    assert "at once: all_gather over replica" in "\n".join(at_once.violations())


@pytest.mark.slow
@pytest.mark.parametrize("wire, share", [slow("f32", 2 / 4), ("int8", 1 + 1 + 2 / 4)])
def test_memory_is_in_the_plan(wire, share):
    """Momentum takes 1/R, and so do global weights, unless the wire is lossy."""
    mode = meshpar.LocalSGD(8, outer=NESTEROV, wire=wire)
    program = tiny_models.lower("replica=4,fsdp=2", mode=mode)
    planned = sizes_by_path(program.plan)
    whole = 4 * program.exchange.fragments.slice_size
    assert planned["outer[0].trace"] == whole // 4
    assert sum(planned.values()) == pytest.approx(whole * share)
    total = program.plan.bytes_per_device()["synchronization"]
    assert total == sum(planned.values())
    sync = program.abstract_state.sync
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(sync))
    assert held == 8 * sum(planned.values())
    late = dataclasses.replace(mode, staleness=2, fragments=2)
    program = tiny_models.lower("replica=4,fsdp=2", mode=late)
    planned = sizes_by_path(program.plan)
    fragment = 4 * program.exchange.fragments.fragment_size
    assert planned["snapshot"] == planned["arrived"] == fragment


def sizes_by_path(plan):
    """{path: bytes per device} of what synchronizes the replicas."""
    return {leaf.path: leaf.bytes_per_device for leaf in plan.synchronization}


def test_integer_weights_are_refused():
    program = lower("data=1", SGD)
    leaf = dataclasses.replace(program.plan.parameters["up"], dtype=np.dtype("int32"))
    plan = dataclasses.replace(program.plan, parameters={"up": leaf})
    with pytest.raises(meshpar.LayoutError, match="up is int32.*store it as float32"):
        make_exchange(meshpar.LocalSGD(), plan, {"replica": 2})
