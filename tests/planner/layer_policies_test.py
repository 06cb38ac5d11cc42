"""Policies per layer: equal to trying all, and as much memory as there is."""

import dataclasses
import itertools

import jax
import numpy as np
import optax
import pytest
from support.tiny_models import batch, standard_model

import meshpar
from meshpar.layouts import parse
from meshpar.mesh.machine import machine_of
from meshpar.planner import plans
from meshpar.planner.candidate import Candidates
from meshpar.planner.facts import Facts
from meshpar.planner.layer_policies import (
    Cost,
    as_remat,
    best_policies,
    mixed_layout,
)

POLICIES = "none", "dots", "full"


def total(layers, policies):
    costs = [costs[policy] for costs, policy in zip(layers, policies, strict=True)]
    return sum(c.seconds for c in costs), sum(c.saved for c in costs)


@pytest.mark.parametrize("depth", range(1, 7))
def test_the_dynamic_program_equals_trying_all(depth):
    rng = np.random.default_rng(depth)
    for _ in range(20):
        layers = [
            {p: Cost(*map(float, rng.integers(1, 20, 2))) for p in POLICIES}
            for _ in range(depth)
        ]
        budget = float(rng.integers(1, 20 * depth))
        every = itertools.product(POLICIES, repeat=depth)
        fitting = [p for p in every if total(layers, p)[1] <= budget]
        found = best_policies(layers, budget)
        assert (found is None) == (not fitting)
        if found is not None:
            seconds, saved = total(layers, found)
            assert saved <= budget
            assert seconds == min(total(layers, p)[0] for p in fitting)


def test_layers_that_save_least_come_first():
    costs = {"none": Cost(1, 9), "dots": Cost(2, 5), "full": Cost(3, 1)}
    assert as_remat(("none", "full", "dots", "full"), costs) == "2*full+1*dots+1*none"
    assert as_remat(("full", "full"), costs) == "full"


@pytest.fixture(scope="module")
def made():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
    devices = jax.devices()[:4]
    facts = Facts(standard_model(), optax.adamw(1e-2), shapes, None, devices)
    # So fast that what is saved costs less time than what is computed again.
    machine = machine_of(devices)
    chip = dataclasses.replace(machine.chip, memory_bandwidth=1e13)
    return Candidates(facts, dataclasses.replace(machine, chip=chip))


def test_a_mix_takes_the_memory_that_there_is(made):
    uniform = [made.candidate(parse(f"fsdp=4,remat={policy}")) for policy in POLICIES]
    none, dots, full = (c.memory.total for c in uniform)
    depth, seconds = made.facts.layered.depth, []
    assert mixed_layout(uniform, depth, none) is None
    assert mixed_layout(uniform, depth, full - 1) is None
    for share in (0.3, 0.6, 0.9):
        memory = int(full + share * (dots - full))
        mix = made.candidate(mixed_layout(uniform, depth, memory))
        assert "*" in mix.layout.remat and mix.memory.total <= memory
        fitting = [c for c in uniform if c.memory.total <= memory]
        assert mix.seconds.total < min(c.seconds.total for c in fitting)
        seconds.append(mix.seconds.total)
    assert seconds == sorted(seconds, reverse=True)
    stages = dataclasses.replace(uniform[0].layout, fsdp=2, pipe=2, microbatches=2)
    staged = [dataclasses.replace(c, layout=stages) for c in uniform]
    assert mixed_layout(staged, depth, (full + dots) // 2) is None


def test_plans_hold_mixes(made, monkeypatch):
    monkeypatch.setattr(plans, "machine_of", lambda *_: tight)
    sizes = "fsdp=4,zero=3,microbatches=1"
    uniform = [made.candidate(parse(f"{sizes},remat={policy}")) for policy in POLICIES]
    dots, full = uniform[1].memory.total, uniform[2].memory.total
    tight = dataclasses.replace(made.machine, memory_bytes=(dots + full) // 2)
    found = meshpar.plan(
        standard_model(),
        optax.adamw(1e-2),
        batch(),
        jax.devices()[:4],
        require=sizes,
        forbid="pipe,tensor,offload",
        top=1,
    )
    assert "*full" in found.layout.remat
