"""Plans of models without layers: all numbers are those of the compiled programs."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from support import graph_models, tiny_models
from support.graph_models import ADAM, Convolutional
from support.marks import first
from support.tpu_programs import tpu

import meshpar
from meshpar.commands.reports import planning
from meshpar.contracts.hlo_work import work_of
from meshpar.errors import LayoutError, MeshparError
from meshpar.explain.report import explain
from meshpar.mesh import topologies
from meshpar.mesh.machine import machine_of
from meshpar.planner import compiled
from meshpar.planner.plans import FROM_LAYERS, FROM_PROGRAMS

D, F, V, B = 16, 64, 32, 32

MODELS = {
    "mlp": (
        lambda: graph_models.mlp(D, F, V),
        lambda: graph_models.squares_batch(B, D, V),
        "",
    ),
    "convolutions": (
        lambda: meshpar.from_nnx(Convolutional, graph_models.squares),
        lambda: graph_models.squares_batch(8, 768, 8),
        "",
    ),
    "transformer with names": (
        lambda: tiny_models.plain_model(depth=1),
        tiny_models.batch,
        "data=1",
    ),
}


@functools.cache
def planned(name, count=4):
    make_model, make_batch, wanted = MODELS[name]
    model, batch, devices = make_model(), make_batch(), jax.devices()[:count]
    return model, batch, meshpar.plan(model, ADAM, batch, devices, require=wanted)


def program_of(model, batch, candidate, devices):
    return meshpar.lower(model, ADAM, candidate.layout, batch, devices=devices)


SPACES = {
    "mlp": {"data=4", "data=2,fsdp=2,zero=2", "data=2,fsdp=2,zero=3"},
    "convolutions": {"data=4", "fsdp=4,zero=2", "fsdp=4,zero=3"},
    "transformer with names": {"tensor=4", "fsdp=2,tensor=2,zero=2", "fsdp=4,zero=3"},
}


def waits(collectives):
    """Messages that wait for each other, as they go both ways round a ring."""
    of_kind = {"all_reduce": lambda n: n, "permute": lambda n: 1}
    return sum(
        c.executions * of_kind.get(c.kind, lambda n: n // 2)(c.group_size)
        for c in collectives
    )


@pytest.mark.parametrize("name", first(1, MODELS))
def test_memory_bytes_and_order_are_those_of_the_programs(name):
    model, batch, plans = planned(name)
    devices, seconds = jax.devices()[:4], []
    machine = machine_of(devices)
    found = {str(candidate.layout) for candidate in plans.fitting}
    assert SPACES[name] <= found and len(found) == 5
    assert plans.method == f"5 {FROM_PROGRAMS}" and not plans.refused
    for candidate in plans.fitting:
        program = program_of(model, batch, candidate, devices)
        read = explain(program)
        assert candidate.memory.total == read.compiled_bytes["peak"] > 0
        assert candidate.wire_bytes == sum(row.found_bytes for row in read.traffic) > 0
        state = candidate.memory.parameters + candidate.memory.optimizer
        assert state == read.state_bytes
        terms = candidate.seconds.by_term
        assert sum(terms.values()) == candidate.seconds.total
        step = program.compiled
        work = work_of(step.as_text(), step.cost_analysis())
        assert terms["compute"] == work.flops / machine.flops
        assert terms["memory"] == work.moved / machine.chip.memory_bandwidth
        # CPUs run transfers one after the other, over one link.
        sent = candidate.wire_bytes / machine.link_bandwidth
        sent += waits(program.inspection.collectives) * machine.chip.link_latency
        assert terms["transfers"] == pytest.approx(sent)
        seconds.append(candidate.seconds.total)
    assert seconds == sorted(seconds)


def test_the_best_layout_trains_as_one_device_does():
    model, batch, plans = planned("mlp")
    optimizer, found = optax.adam(1e-2, eps=1e-2), {}
    for layout, count in ((plans.layout, 4), ("data=1", 1)):
        devices = jax.devices()[:count]
        program = meshpar.lower(model, optimizer, layout, batch, devices=devices)
        state, losses = program.init(seed=0), []
        for _ in range(3):
            state, metrics = program.step(state, batch)
            losses.append(float(metrics["loss"]))
        found[count] = losses
    np.testing.assert_allclose(found[4], found[1], rtol=1e-4)


def test_a_plan_is_as_wanted_and_prints():
    model, batch, plans = planned("mlp")
    assert FROM_PROGRAMS in planning.summary(plans)
    row = planning.candidate_row(plans, plans.best[0])
    assert row[0] == str(plans.layout) and "%" in row[4]
    assert plans.why_not(plans.best[0]) == "" and plans.best[0].uncertainty is None
    assert "slower" in plans.why_not(plans.fitting[-1])
    found = planning.as_dict(plans, [])
    assert found["method"] == plans.method != FROM_LAYERS
    seconds = dict(found["best"][0]["seconds"])
    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total)
    options = dict(require="fsdp=2,zero=2", forbid="tensor", top=1)
    devices = jax.devices()[:4]
    slow = meshpar.plan(model, ADAM, batch, devices, slowdown=3.0, **options)
    (candidate,) = slow.fitting
    assert str(candidate.layout) == "data=2,fsdp=2,zero=2"
    before = next(c for c in plans.fitting if c.layout == candidate.layout)
    ratio = candidate.seconds.total / before.seconds.total
    assert ratio == pytest.approx(3) and candidate.memory == before.memory


def test_options_and_rules_that_are_required_are_compiled():
    """Splits of parameters without names, and microbatches, need no prediction."""
    model, batch, _ = planned("mlp")
    devices = jax.devices()[:4]
    rules = 'tensor=4,paths."0/kernel"=none/tensor,paths."1/kernel"=tensor/none'
    for require in (rules, "fsdp=4,zero=2,microbatches=4"):
        plans = meshpar.plan(model, ADAM, batch, devices, require=require)
        assert plans.layout == meshpar.layouts.parse(require)
        read = explain(program_of(model, batch, plans.best[0], devices))
        assert plans.best[0].memory.total == read.compiled_bytes["peak"]
    # An axis that rules name takes all sizes.
    rules = 'paths."0/kernel"=none/tensor,paths."1/kernel"=tensor/none'
    plans = meshpar.plan(model, ADAM, batch, devices, require=f"{rules},fsdp=1")
    assert {c.layout.tensor for c in plans.fitting} == {1, 2, 4}
    for item, why in (("pipe=2", "pipe=N"), ("offload=optimizer", "offload=")):
        with pytest.raises(LayoutError, match=f"refused: {why}"):
            meshpar.plan(model, ADAM, batch, devices, require=item)


def test_memory_is_a_limit():
    model, batch, roomy = planned("mlp")
    devices, sizes = jax.devices()[:4], [c.memory.total for c in roomy.fitting]
    budget = min(sizes)
    tight = meshpar.plan(model, ADAM, batch, devices, memory=budget)
    assert {c.memory.total for c in tight.fitting} == {budget}
    state = {c.memory.parameters + c.memory.optimizer for c in roomy.fitting}
    for candidate in tight.too_large:
        size = candidate.memory.parameters + candidate.memory.optimizer
        assert candidate.memory.total > budget >= size > min(state)
    with pytest.raises(LayoutError, match="the smallest, .* needs"):
        meshpar.plan(model, ADAM, batch, devices, memory=budget - 1)
    with pytest.raises(LayoutError, match="the smallest, fsdp=4.* state alone"):
        meshpar.plan(model, ADAM, batch, devices, memory=5_000)


def test_what_cannot_be_is_not_compiled(monkeypatch):
    """Sizes that do not divide, state that does not fit, and more than a few dozen."""
    model, batch, _ = planned("mlp")
    lowered, lower = [], compiled.lower

    def counted(model, optimizer, layout, batch, **options):
        lowered.append(layout)
        return lower(model, optimizer, layout, batch, **options)

    monkeypatch.setattr(compiled, "lower", counted)
    devices = jax.devices()[:4]
    few = jax.tree.map(lambda x: x[:2], batch)
    with pytest.raises(LayoutError, match="refused: batch=N does not divide"):
        meshpar.plan(model, ADAM, few, devices, require="data=4")
    assert not lowered
    state = 3 * 4 * (D * F + F * V)
    with pytest.raises(LayoutError, match="do not fit into a device"):
        meshpar.plan(model, ADAM, batch, devices, memory=state - 1, forbid="fsdp")
    assert not lowered
    monkeypatch.setattr(compiled, "MOST_COMPILED", 1)
    plans = meshpar.plan(model, ADAM, batch, devices, forbid="fsdp")
    assert len(lowered) == 1 and not plans.refused
    plans = meshpar.plan(model, ADAM, batch, devices, require="data=2")
    assert len(lowered) == 2 and plans.method.startswith("1 layouts compiled")
    assert sum(n for why, n in plans.refused.items() if "not compiled" in why) == 1


def test_a_compiler_that_fails_refuses_one_layout(monkeypatch):
    model, batch, _ = planned("mlp")
    read = compiled.read_candidate

    def failing(program, machine):
        if program.layout.zero == 3:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory")
        if program.layout.fsdp == 1:
            raise jax.errors.JaxRuntimeError("INTERNAL: a bug")
        return read(program, machine)

    monkeypatch.setattr(compiled, "read_candidate", failing)
    plans = meshpar.plan(model, ADAM, batch, jax.devices()[:4])
    assert {c.layout.zero for c in plans.fitting} == {2}
    assert plans.refused == {
        "the compiler finds no room for the step in a device": 2,
        "no program: INTERNAL: a bug": 1,
    }
    with pytest.raises(
        LayoutError, match=r"\n  fsdp=4,zero=3: RESOURCE_EXHAUSTED: Ran"
    ):
        meshpar.plan(model, ADAM, batch, jax.devices()[:4], require="zero=3")


@tpu
def test_time_on_tpus_is_that_of_their_compiler():
    model, batch, _ = planned("mlp")
    plans = meshpar.plan(model, ADAM, batch, "v5e:2x2", forbid="data")
    devices = meshpar.mesh.topology("v5e:2x2")
    assert plans.machine.chip.name == "v5e" and len(plans.fitting) == 2
    for candidate in plans.fitting:
        program = program_of(model, batch, candidate, devices)
        read, found = explain(program), program.inspection.collectives
        assert candidate.memory.total == read.compiled_bytes["peak"]
        assert candidate.wire_bytes == sum(row.found_bytes for row in read.traffic)
        # At a microsecond per hop.
        latency = 1e-6 * waits([c for c in found if not c.overlapped])
        assert candidate.seconds.total == pytest.approx(read.time.seconds + latency)


def test_without_a_compiler_programs_for_cpus_are_read(monkeypatch):
    def missing(*args, **options):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(topologies.topologies, "get_topology_desc", missing)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    model, batch, on_cpus = planned("mlp")
    plans = meshpar.plan(model, ADAM, batch, "v5p:2x2x1")
    assert plans.machine.chip.name == "v5p"
    assert "without a compiler for v5p" in planning.summary(plans)
    sizes = {c.layout: (c.memory, c.wire_bytes) for c in on_cpus.fitting}
    assert {c.layout: (c.memory, c.wire_bytes) for c in plans.fitting} == sizes
    rate, fast = on_cpus.machine.flops, plans.machine.flops
    for candidate in plans.fitting:
        slow = next(c for c in on_cpus.fitting if c.layout == candidate.layout)
        flops = slow.seconds.compute * rate
        assert candidate.seconds.compute == pytest.approx(flops / fast)
    with pytest.raises(MeshparError, match=r"or simulate 16 .*meshpar.simulate\(16\)"):
        meshpar.plan(model, ADAM, batch, "v5e:4x4")
    with pytest.raises(MeshparError, match=r"aot-tpu.* brings its compiler"):
        meshpar.plan(model, ADAM, batch, "2*v5e:2x2")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    with pytest.raises(MeshparError, match="no compiler; the TPU compiler comes with"):
        meshpar.plan(model, ADAM, batch, "v5p:2x2x1")


def test_between_slices_transfers_are_slow():
    model, batch, plans = planned("mlp")
    slow = next(c for c in plans.fitting if str(c.layout) == "data=4")
    program = program_of(model, batch, slow, jax.devices()[:4])
    machine = dataclasses.replace(plans.machine)
    vars(machine)["num_slices"] = 2
    two, one = compiled.read_candidate(program, machine).seconds, slow.seconds
    assert two.wire_bytes == one.wire_bytes and two.compute == one.compute
    near, far = (machine.link(x)._replace(latency=0.0) for x in (False, True))
    found = program.inspection.collectives
    latency = two.transfers - sum(c.seconds(far) for c in found)
    assert latency == pytest.approx(
        sum(c.executions * 2 * 3 * machine.chip.slice_latency for c in found)
    )
    of_bytes = one.transfers - sum(c.executions * 4e-6 for c in found)
    ratio = near.bandwidth / far.bandwidth
    assert two.transfers - latency == pytest.approx(ratio * of_bytes)
