"""What the planner predicts of layers with rematerialization policies of their own."""

import math

import jax
import optax
import pytest
from support.tiny_models import batch, lower, standard_model

from meshpar.layouts import parse
from meshpar.mesh.machine import machine_of
from meshpar.planner.candidate import Candidates
from meshpar.planner.facts import Facts


@pytest.fixture(scope="module")
def candidates():
    shapes = jax.eval_shape(batch)
    facts = Facts(standard_model(), optax.adamw(1e-2), shapes, None, jax.devices())
    return Candidates(facts, machine_of(jax.devices()[:8]))


def test_a_mix_costs_what_its_layers_cost(candidates):
    full, mix, none = (
        candidates.candidate(parse(f"fsdp=4,tensor=2,remat={remat}"))
        for remat in ("full", "3*full+5*none", "none")
    )
    assert none.seconds.again == 0 < mix.seconds.again
    assert mix.seconds.again == pytest.approx(full.seconds.again * 3 / 8)
    for kind in ("wire_bytes", "tensor"):
        values = [getattr(c.seconds, kind) for c in (full, mix, none)]
        assert values[1] == pytest.approx((3 * values[0] + 5 * values[2]) / 8)
        assert values[0] > values[1] > values[2]
    kept = [c.memory.activations for c in (full, mix, none)]
    assert kept[1] == pytest.approx((3 * kept[0] + 5 * kept[2]) / 8, abs=8)


def test_each_scan_of_a_mix_prefetches_its_first_layer(candidates):
    text = "fsdp=8,remat={},prefetch=attention/q"
    mix, uniform = (parse(text.format(r)) for r in ("1*full+3*none+4*dots", "none"))
    found = {
        layout: candidates.candidate(layout).wire_bytes for layout in (mix, uniform)
    }
    program = lower(mix, standard_model())
    assert found[mix] == pytest.approx(program.contract.wire_bytes, rel=0.01)
    shape = program.plan.weights["blocks/attention/q"].shape
    one = 4 * math.prod(shape[1:]) * 7 / 8
    # Two scans more than one, forward and backward.
    assert found[mix] - found[uniform] == pytest.approx(2 * 2 * one)
