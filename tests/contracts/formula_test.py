"""The formula by which planners know a layout's traffic equals what its step writes.

Planners add up the traffic of layouts that nobody traces. Their formula gives the
weights and gradients that ZeRO moves, the sends of a pipeline, and what layers move for
experts and attention over split sequences.
"""

import dataclasses
import functools
import random

import pytest
from support.marks import slow
from support.tiny_models import lower, model, standard_model

from meshpar.layouts.axes import CONTEXT, EXPERT, PIPE
from meshpar.layouts.mixes import segments
from meshpar.lowering.layer_collectives import layer_collectives, layers_terms
from meshpar.schedules import ZERO_BUBBLE

NUM, SLOW_NUM = 2, 24
TIED = functools.cache(functools.partial(model, depth=8, tied=True))
MIXTURE = functools.cache(functools.partial(model, num_experts=8, experts_per_token=2))


def random_layout(seed):
    """A layout that splits layers, weights or the batch in one of many ways."""
    rng = random.Random(seed)
    pipe = rng.choice((1, 1, 2, 4))
    rest, parts = 8 // pipe, [f"pipe={pipe}"]
    tensor = rng.choice((1, 1, 2)) if rest > 1 else 1
    fsdp = rng.choice([n for n in (1, 2, 4, 8) if n <= rest // tensor])
    data = rest // tensor // fsdp
    parts += [f"data={data}", f"fsdp={fsdp}", f"tensor={tensor}"]
    if fsdp > 1:
        parts.append(f"zero={rng.choice((1, 2, 3))}")
    if pipe > 1:
        parts.append(f"microbatches={2 * pipe}")
        ways = ["schedule=1f1b", "schedule=gpipe", "virtual_stages=2", "save=residuals"]
        parts.append(rng.choice([*ways, *(f"schedule={name}" for name in ZERO_BUBBLE)]))
    else:
        parts.append(f"microbatches={rng.choice((1, 2))}")
        parts.append(f"remat={rng.choice(('none', 'full', 'dots'))}")
        if tensor > 1 and "zero=1" not in parts and "zero=2" not in parts:
            parts.append("layers=fsdp")
    return ",".join(parts)


def check(program):
    written = program.inspection.written_terms
    assert program.lowering.formula_violations(program.inspection.written) == []
    # Of gathers, a backward pass may leave out a few small ones that it does not read.
    gathers = [t for t in written if t.kind == "all_gather" and "weights" in t.why]
    ours = sum(t.payload_bytes for t in gathers if t.why.startswith("zero="))
    formula = program.lowering.formula()
    right = sum(t.payload_bytes for t in formula if t.kind == "all_gather")
    assert 0.95 * right <= ours <= right
    sends = [t for t in written if t.kind == "permute" and t.axes == (PIPE,)]
    if program.layout.pipe > 1:
        loop = program.lowering.runner.loop
        number = loop.num_activation_sends + loop.num_gradient_sends
        assert sum(t.count for t in sends) == number
        assert not any(t.bound for t in sends)


@pytest.mark.parametrize("seed", [*range(NUM), *map(slow, range(NUM, SLOW_NUM))])
def test_random_layouts_write_what_the_formula_says(seed):
    check(lower(random_layout(seed), standard_model()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        slow("fsdp=4,prefetch=attention/[qkv]$,prefetch=mlp"),
        slow("fsdp=4,zero=1,remat=1*full+6*dots+1*none"),
        "data=2,fsdp=2,tensor=2,microbatches=2,layers=3*fsdp+4*tensor+1*fsdp",
        slow("pipe=4,fsdp=2,zero=3,microbatches=4,vocab=pipe,tick_loop=uniform"),
        slow("pipe=2,data=2,microbatches=4,partition=3/5"),
    ],
)
def test_layouts_of_every_kind_write_what_the_formula_says(layout):
    check(lower(layout, standard_model()))


@pytest.mark.slow
def test_tied_weights_are_written_once():
    check(lower("pipe=4,fsdp=2,zero=3,microbatches=4,vocab=pipe", TIED()))


def totals(terms):
    """{(kind, axes): (executions, bytes)}."""
    found = {}
    for term in terms:
        count, size = found.get((term.kind, term.axes), (0, 0))
        found[term.kind, term.axes] = count + term.count, size + term.payload_bytes
    return found


@pytest.mark.parametrize(
    "layout, routing",
    [
        ("data=2,expert=4,remat=full,microbatches=2", "capacity"),
        slow("fsdp=2,expert=4,remat=1*full+1*dots", "dropless"),
        slow("pipe=2,data=2,expert=2,microbatches=4", "capacity"),
        slow("context=4,context_mode=ring,remat=full", ""),
        slow("data=2,context=4,remat=full", ""),
        slow("fsdp=2,context=4,context_mode=ulysses,remat=dots,microbatches=2", ""),
    ],
)
def test_what_layers_move_is_written_as_planners_multiply_one_layer(layout, routing):
    program = lower(layout, MIXTURE(routing=routing) if routing else model())
    lowering = program.lowering
    others = (*lowering.runner.purposes, "loss and metrics", "metrics of kind Max")
    written = (
        term
        for term in program.inspection.written_terms
        if {EXPERT, CONTEXT} & set(term.axes) and not term.why.startswith(others)
    )
    frame, passes = lowering.frame, lowering.runner.layer_passes
    remats = [remat for remat, _ in segments(program.layout.remat, 2)]
    found = layer_collectives(frame, program.step_batch, remats)
    terms = layers_terms(program.layout, passes, found)
    assert totals(written) == totals(terms) != {}


def test_a_reduction_that_a_step_lacks_is_found():
    program = lower("data=2,fsdp=4", standard_model())
    written = program.inspection.written
    for i, term in enumerate(written):
        less = [*written[:i], *written[i + 1 :]]
        lines = program.lowering.formula_violations(less)
        known = term.why.startswith(("zero=", "gradients"))
        known &= term.kind != "all_gather"
        assert bool(lines) == known, term
    half = [dataclasses.replace(t, payload_bytes=t.payload_bytes // 2) for t in written]
    lines = program.lowering.formula_violations(half)
    assert any("reduce_scatter over fsdp: the step writes" in line for line in lines)
    more = [dataclasses.replace(t, payload_bytes=2 * t.payload_bytes) for t in written]
    assert len(program.lowering.formula_violations(more)) == 3
