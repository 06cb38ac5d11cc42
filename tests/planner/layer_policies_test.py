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
    LayerCost,
    LayerPolicy,
    as_options,
    best_choices,
    mixed_layout,
)

POLICIES = "none", "dots", "full"
USES = "tensor", "fsdp"


def total(layers, choices, change):
    costs = [costs[choice] for costs, choice in zip(layers, choices, strict=True)]
    uses = ["tensor", *(choice.use for choice in choices), "tensor"]
    changes = sum(a != b for a, b in itertools.pairwise(uses))
    seconds = sum(c.seconds for c in costs) + change * changes
    return seconds, sum(c.saved for c in costs)


@pytest.mark.parametrize("policies, uses", [(3, 1), (2, 2)])
@pytest.mark.parametrize("depth", range(1, 7))
def test_the_dynamic_program_equals_trying_all(depth, policies, uses):
    rng = np.random.default_rng(depth)
    choices = list(itertools.product(POLICIES[:policies], USES[:uses]))
    choices = [LayerPolicy(*choice) for choice in choices]
    for _ in range(10):
        layers = [
            {c: LayerCost(*map(float, rng.integers(1, 20, 2))) for c in choices}
            for _ in range(depth)
        ]
        budget, change = map(float, rng.integers(1, (20 * depth, 12)))
        every = (
            total(layers, c, change) for c in itertools.product(choices, repeat=depth)
        )
        fitting = [seconds for seconds, saved in every if saved <= budget]
        found = best_choices(layers, budget, change)
        assert (found is None) == (not fitting)
        if found is not None:
            assert found[:2] == total(layers, found.choices, change)
            assert found.saved <= budget
            assert found.seconds == min(fitting)


def test_layers_that_save_least_come_first_among_those_of_one_use():
    costs = {
        LayerPolicy(remat, use): LayerCost(0, saved)
        for use in USES
        for remat, saved in (("none", 9), ("dots", 5), ("full", 1))
    }

    def options(*choices):
        return as_options([LayerPolicy(*choice) for choice in choices], costs)

    assert options(("none",), ("full",), ("dots",), ("full",)) == {
        "remat": "2*full+1*dots+1*none",
        "layers": "tensor",
    }
    assert options(("full",), ("full",)) == {"remat": "full", "layers": "tensor"}
    assert options(("none", "tensor"), ("dots", "fsdp"), ("full", "tensor")) == {
        "remat": "1*dots+1*full+1*none",
        "layers": "1*fsdp+2*tensor",
    }


@pytest.fixture(scope="module")
def made():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
    devices = jax.devices()[:4]
    facts = Facts(standard_model(), optax.adamw(1e-2), shapes, None, devices)
    # So fast that what is saved costs less time than what is computed again.
    machine = machine_of(devices)
    chip = dataclasses.replace(machine.chip, memory_bandwidth=1e13)
    fast = dataclasses.replace(machine, chip=chip, fresh_bandwidth=1e13)
    return Candidates(facts, fast)


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


def test_a_mix_takes_the_use_that_costs_least(made):
    def candidate(use, policy, times=1.0):
        layout = parse(f"fsdp=2,tensor=2,layers={use},remat={policy}")
        found = made.candidate(layout)
        return dataclasses.replace(found, seconds=found.seconds.slower(times))

    depth = made.facts.layered.depth
    for faster, slower in (USES, USES[::-1]):
        uniform = [candidate(faster, policy) for policy in POLICIES]
        _, dots, full = (c.memory.total for c in uniform)
        uniform += [candidate(slower, policy, 9.0) for policy in POLICIES]
        mix = mixed_layout(uniform, depth, (dots + full) // 2)
        assert mix.layers == faster and "*" in mix.remat


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
