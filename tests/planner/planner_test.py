"""The planner: traffic of the contract, memory as `explain` predicts it, and laws."""

import dataclasses
import functools
import itertools
import math
from unittest import mock

import jax
import numpy as np
import optax
import pytest
from support.marks import first
from support.tiny_models import (
    BATCH,
    LENGTH,
    batch,
    lower,
    model,
    plain_model,
    standard_model,
)
from support.tpu_programs import small, tpu

import meshpar
from experiments.recipes import optimizers
from meshpar import mesh
from meshpar.contracts.host_transfers import link_seconds
from meshpar.errors import LayoutError, MeshparError
from meshpar.layouts import parse
from meshpar.layouts.wanted import Wanted
from meshpar.lowering.layer_trace import trace_layer
from meshpar.mesh.machine import machine_of
from meshpar.planner import plans as planning
from meshpar.planner.candidate import Candidates
from meshpar.planner.facts import Facts
from meshpar.planner.space import layouts
from meshpar.planner.uncertainty import MEASURED, ErrorRange
from meshpar.runs import programs
from meshpar.runs.config import with_settings

OPTIMIZER = optax.adamw(1e-2)


def shapes(size=BATCH):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch(size=size)
    )


@pytest.fixture(scope="module")
def facts():
    return Facts(standard_model(), OPTIMIZER, shapes(), None, jax.devices())


@pytest.fixture(scope="module")
def candidates(facts):
    return Candidates(facts, machine_of(jax.devices()[:8]))


EQUAL_TO_A_LOWERED_PROGRAM = (
    "fsdp=2,tensor=4,remat=full,layers=3*fsdp+5*tensor",
    # With -m slow:
    "data=2,fsdp=4,zero=1",
    "pipe=4,data=2,microbatches=4,schedule=interleaved,virtual_stages=2",
    "pipe=2,fsdp=4,microbatches=2,partition=5/3",
    "data=2,fsdp=4",
    "fsdp=8,microbatches=2,remat=full",
    "fsdp=4,tensor=2,remat=dots",
    "fsdp=4,tensor=2,layers=fsdp",
    "pipe=2,fsdp=4,microbatches=2,zero=1",
)


def hops(kind, n):
    """Messages that wait for each other where parts go both ways round a ring."""
    one_way = 1 if kind == "permute" else n // 2
    return 2 * one_way if kind == "all_reduce" else one_way


@pytest.mark.parametrize("text", first(1, EQUAL_TO_A_LOWERED_PROGRAM))
def test_memory_and_traffic_are_those_of_a_lowered_program(candidates, text):
    candidate = candidates.candidate(parse(text))
    program = lower(text, standard_model())
    memory = program.lowering.memory(program.step_batch)
    for kind, size in dataclasses.asdict(memory).items():
        # What does not grow with the rows, such as a mask, differs a little.
        found = getattr(candidate.memory, kind)
        assert found == pytest.approx(size, rel=0.02), kind
    if "tensor" not in text or "layers=fsdp" in text:
        # The sums of loss and norm are not worth a plan.
        exact = [term for term in program.contract.terms if not term.bound]
        # Nor are the few activations that embedding and head move.
        words = "of the embedding", "of the head", "slices of the vocabulary"
        exact = [t for t in exact if not any(word in t.why for word in words)]
        wire = sum(term.wire_bytes for term in exact)
        assert candidate.wire_bytes == pytest.approx(wire, rel=0.01)
        waits = sum(
            term.count * hops(term.kind, term.group_size)
            for term in exact
            if "loss" not in term.why and "norm" not in term.why
        )
        latency = candidates.machine.chip.link_latency
        # The formula counts gathers that nothing reads, too.
        assert waits * (1 - 1e-6) <= candidate.seconds.latency / latency <= 1.03 * waits


def test_gradients_that_are_reduced_once_a_step_are_whole_until_then(facts, candidates):
    """Several microbatches sum whole gradients in float32, unless zero=3.

    Beside the sums are gradients of embedding and head alone: layers add theirs.
    """
    sizes = {path: math.prod(p.shape) * 4 for path, p in facts.model.params.items()}
    whole = sum(sizes.values())
    shared = sum(facts.layered.split(sizes)[0].values())

    def gradients(text):
        return candidates.candidate(parse(f"fsdp=8,min_shard_size=0,{text}")).memory

    assert gradients("zero=2").gradients == pytest.approx(whole / 8, rel=0.05)
    for text in ("zero=1,microbatches=2", "zero=2,microbatches=2"):
        assert gradients(text).gradients == whole + shared
    three = gradients("zero=3,microbatches=2").gradients
    assert three == pytest.approx((whole + shared) / 8, rel=0.05)


def test_activations_without_rows_of_their_own_are_refused_as_by_lower():
    """A mixture passes its losses on beside the activations."""
    of, layout = model(num_experts=4), parse("fsdp=4,tensor=2,layers=fsdp")
    own = Facts(of, OPTIMIZER, shapes(), None, jax.devices())
    candidates = Candidates(own, machine_of(jax.devices()[:8]))
    with pytest.raises(LayoutError, match="no dim that holds the rows") as lowered:
        lower(layout, of)
    with pytest.raises(LayoutError) as planned:
        candidates.candidate(layout)
    assert str(planned.value) == str(lowered.value)


def test_layers_that_split_rows_move_weights_in_place_of_activations(candidates):
    features, mix, rows = (
        candidates.candidate(parse(f"fsdp=2,tensor=4,layers={layers}")).seconds
        for layers in ("tensor", "4*tensor+4*fsdp", "fsdp")
    )
    assert features.tensor > mix.tensor > rows.tensor > 0
    assert features.state < mix.state < rows.state
    assert features.layers == pytest.approx(mix.layers) == pytest.approx(rows.layers)


def test_no_cut_of_the_layers_beats_the_even_one(candidates):
    """All stages run a tick together: each waits for the one with most layers."""
    text = "pipe=4,data=2,microbatches=4"
    even = candidates.candidate(parse(text))
    for sizes in itertools.product(range(1, 6), repeat=4):
        if sum(sizes) == 8:
            cut = f"{text},partition={'/'.join(map(str, sizes))}"
            other = candidates.candidate(parse(cut))
            assert other.seconds.total >= even.seconds.total
            assert other.memory.total >= even.memory.total


@pytest.mark.slow
@tpu
def test_experts_are_predicted_as_devices_hold_them():
    """Rows of the worst case, and grouped matmuls in memory and time."""
    settings = ["model.num_experts=4", "model.routing=dropless", "model.mlp=768"]
    config, devices = with_settings(small(), settings), mesh.topology("v5p:2x2x1")
    model = config.make_model()
    optimizer = optimizers.make_optimizer(config.optimizer, config.steps, model)
    rows = config.abstract_batch()
    dtype = programs.compute_dtype(config)
    made = Candidates(
        Facts(model, optimizer, rows, dtype, devices), machine_of(devices)
    )
    layout = parse("fsdp=2,expert=2,remat=full")
    program = config.make_program(layout, devices)
    lowered = program.lowering.memory(program.step_batch)
    candidate = made.candidate(layout)
    assert candidate.memory.total == pytest.approx(lowered.total, rel=0.02)
    # Two of four experts for each token: gate, up and down of 512 x 768.
    experts = 2 * 3 * 2 * 512 * 768 * 256
    dense = Candidates(
        Facts(small().make_model(), optimizer, rows, dtype, devices),
        machine_of(devices),
    )
    rest = dense.facts.flops.layer - 3 * 2 * 512 * 2048 * 256
    # Padding of groups to whole blocks is counted, too.
    assert experts < made.facts.flops.layer - rest < 1.6 * experts


@pytest.mark.slow
@tpu
def test_tensor_splits_no_rows_of_tokens_and_their_experts():
    """Every device along it runs the same tokens, through a part of each expert."""
    settings = ["model.num_experts=4", "model.routing=dropless", "model.mlp=768"]
    config, devices = with_settings(small(), settings), mesh.topology("v5p:2x2x1")
    layout = parse("fsdp=2,tensor=2,remat=full")
    program = config.make_program(layout, devices)
    lowering, model = program.lowering, config.make_model()
    traced = trace_layer(
        model.layered, lowering.plan, lowering.mesh, program.step_batch
    )
    optimizer = optimizers.make_optimizer(config.optimizer, config.steps, model)
    dtype = programs.compute_dtype(config)
    facts = Facts(model, optimizer, config.abstract_batch(), dtype, devices)
    layer = facts.layer(layout, config.batch_size / 2, 2)
    for name in ("grouped", "grouped_whole"):
        expected = getattr(traced, name)
        assert getattr(layer, name) == pytest.approx(expected, rel=0.001) and expected


def test_flops_are_those_of_the_matmuls(facts):
    config = facts.model.params
    stack = {p: x for p, x in config.items() if p.startswith(facts.layered.prefix)}
    weights = sum(np.prod(p.shape[1:]) for p in stack.values() if len(p.shape) > 2)
    attention = 2 * 2 * LENGTH * LENGTH * 32  # Scores, and their product with values.
    assert facts.flops.layer == 2 * LENGTH * weights + attention
    assert facts.flops.outside >= 2 * LENGTH * 32 * 64  # The head, and no loop less.


def test_layouts_fill_the_devices_and_are_as_wanted():
    wanted = Wanted.of("zero=3,remat=full", "pipe,tensor")
    found = list(layouts(8, model(), BATCH, LENGTH, wanted))
    assert found and len({str(layout) for layout in found}) == len(found)
    for layout in found:
        assert layout.num_devices == 8 and layout.zero_level == 3
        assert layout.remat == "full" and layout.pipe == layout.tensor == 1
    with pytest.raises(LayoutError, match="forbid=pip: layouts have"):
        Wanted.of("", "pip")
    with pytest.raises(LayoutError, match="required and forbidden"):
        Wanted.of("tensor=2", "tensor")


def test_a_slow_link_changes_the_choice_as_the_formula_says(facts):
    machine = machine_of(jax.devices()[:8])
    texts = "pipe=2,data=4,microbatches=4", "data=8"

    def seconds(bandwidth):
        chip = dataclasses.replace(machine.chip, link_bandwidth=bandwidth)
        slower = dataclasses.replace(machine, chip=chip)
        made = Candidates(facts, slower)
        return [made.candidate(parse(text)).seconds for text in texts]

    for bandwidth in (1e12, 1e6):
        stages, replicas = seconds(bandwidth)
        assert (stages.total < replicas.total) == (bandwidth == 1e6)
        moved = replicas.wire_bytes / (2 * bandwidth)
        assert replicas.state == pytest.approx(moved, rel=1e-6)


@pytest.mark.slow
def test_axes_over_slices_take_the_slow_links():
    found = {}
    for name in ("v5e:2x4", "2*v5e:2x2"):
        devices = mesh.topology(name)
        facts = Facts(standard_model(), OPTIMIZER, shapes(), None, devices)
        made = Candidates(facts, machine_of(devices))
        found[name] = made.candidate(parse("data=2,fsdp=4")).seconds
    near, far = found.values()
    assert near.wire_bytes == far.wire_bytes
    # Only `data` crosses the slices, at 6.25 in place of 90 GB/s.
    assert 2 < far.state / near.state < 90 / 6.25


@functools.cache
def small_facts():
    return Facts(model(), OPTIMIZER, shapes(), None, jax.devices()[:4])


def plan(**options):
    """Plans of one model, whose layers are traced once for all of them."""
    options = dict(forbid="pipe,tensor", top=1) | options
    facts = small_facts()
    with mock.patch.object(planning, "Facts", lambda *_: facts):
        return meshpar.plan(facts.model, OPTIMIZER, batch(), facts.devices, **options)


def test_the_budget_holds_and_more_memory_is_never_slower():
    roomy = plan()
    least = min(c.memory.total for c in roomy.fitting)
    most = roomy.best[0].memory.total
    seconds = []
    for budget in (least, (least + most) // 2):
        plans = plan(memory=budget)
        assert all(c.memory.total <= budget for c in plans.fitting)
        assert all(c.memory.total > budget for c in plans.too_large)
        assert all("too much" in plans.why_not(c) for c in plans.too_large)
        seconds.append(plans.best[0].seconds.total)
    seconds.append(roomy.best[0].seconds.total)
    assert seconds == sorted(seconds, reverse=True)
    assert roomy.why_not(roomy.best[0]) == ""
    front = roomy.pareto
    for one, other in zip(front, front[1:], strict=False):
        assert one.seconds.total <= other.seconds.total
        assert one.memory.total > other.memory.total


@pytest.mark.slow
def test_a_prediction_has_a_range_and_says_if_it_may_not_fit():
    devices = mesh.topology("v5e:2x2")
    options = dict(forbid="tensor,expert,context", top=1)
    roomy = meshpar.plan(standard_model(), OPTIMIZER, batch(), devices, **options)
    stages, plain = (
        next(c for c in roomy.fitting if (c.layout.pipe > 1) == piped)
        for piped in (True, False)
    )
    for candidate, kind in ((stages, "pipe"), (plain, "others")):
        assert candidate.uncertainty == MEASURED["tpu", kind]
        assert candidate.most_memory > candidate.memory.total
        assert roomy.warning(candidate) == ""
        tight = dataclasses.replace(
            roomy.machine, memory_bytes=int(candidate.most_memory) - 1
        )
        plans = dataclasses.replace(roomy, machine=tight)
        assert "may need up to" in plans.why_not(candidate)
    assert str(ErrorRange(0.9, 1.25)) == "-10% to +25%"
    # No CPU program was held against its prediction.
    assert plan().best[0].uncertainty is None


@pytest.mark.slow
def test_what_does_not_fit_moves_to_the_host_and_costs_its_link(facts):
    require = "zero=3,remat=full"
    least = min(c.memory.total for c in plan(require=require).fitting)
    plans = plan(memory=least - 1, require=require)
    assert plans.fitting and all(c.layout.offloaded for c in plans.fitting)
    with pytest.raises(LayoutError, match="the smallest"):
        plan(memory=least - 1, require=require, forbid="pipe,tensor,offload")
    # It moves what the lowered program declares, and the update hides none of it.
    text = "fsdp=4,offload=optimizer"
    devices = jax.devices()[:4]
    made = Candidates(facts, machine_of(devices))
    stays, moves = (made.candidate(parse(t)) for t in ("fsdp=4", text))
    program = lower(text, standard_model())
    memory = program.lowering.memory(program.step_batch)
    assert moves.memory.host == memory.host > 0 == stays.memory.host
    assert moves.memory.total < stays.memory.total
    bandwidth = machine_of(devices).chip.host_bandwidth
    seconds = link_seconds(program.contract.host, bandwidth)
    assert moves.seconds.host == pytest.approx(seconds) and not stays.seconds.host
    # The layers' compute hides activations on their way, if the machine overlaps them.
    text = "fsdp=4,offload=activations"
    exposed = made.candidate(parse(text)).seconds.host
    overlaps = dataclasses.replace(machine_of(devices), overlaps=True)
    hidden = Candidates(facts, overlaps).candidate(parse(text)).seconds.host
    assert exposed > hidden >= 0


def test_no_fitting_layout_says_what_comes_nearest():
    with pytest.raises(LayoutError, match="the smallest, .* needs .* GB a device"):
        plan(memory=1000)


def test_facts_need_layers():
    with pytest.raises(MeshparError, match="no layered form"):
        Facts(plain_model(), OPTIMIZER, shapes(), None, jax.devices())


@pytest.mark.slow
def test_a_vocabulary_that_does_not_divide_stays_whole():
    odd = model(vocab=67, kv_heads=4)
    options = dict(require="data=2,tensor=4,remat=full,params.embed=none", top=1)
    plans = meshpar.plan(odd, OPTIMIZER, shapes(), jax.devices(), **options)
    assert dict(plans.layout.params) == {"embed": (), "vocab": ()}
    assert dict(plans.layout.activations) == {"vocab": ()}
    even = meshpar.plan(standard_model(), OPTIMIZER, shapes(), jax.devices(), **options)
    assert dict(even.layout.params) == {"embed": ()} and not even.layout.activations
    # All devices along tensor compute all logits.
    assert plans.best[0].seconds.outside > 1.2 * even.best[0].seconds.outside
