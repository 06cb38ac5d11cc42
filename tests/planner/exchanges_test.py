"""Layouts whose exchanges planners do not trace, against traces of them."""

import jax
import optax
import pytest
from support.marks import slow
from support.tiny_models import batch, model

from meshpar.layouts import parse
from meshpar.mesh.machine import machine_of
from meshpar.planner import facts as planner_facts
from meshpar.planner import layer_moves
from meshpar.planner.candidate import Candidates
from meshpar.planner.exchanges import exchange_of, law_of
from meshpar.planner.facts import Facts
from meshpar.planner.layer_moves import LayerMoves

DROPLESS = {"num_experts": 4, "routing": "dropless"}
CAPACITY = {"num_experts": 4, "routing": "capacity"}
"""Its slots are those of a whole sequence: no law for `expert` and `context`."""


def facts(**kinds):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
    own = model(depth=4, **kinds)
    return Facts(own, optax.adamw(1e-2), shapes, None, jax.devices())


@pytest.mark.parametrize(
    "layout, kinds",
    [
        ("context=8", {}),
        slow("context=8,remat=full", {}),
        slow("context=8,context_mode=ulysses", {}),
        slow("context=8,context_mode=ulysses,remat=full", {}),
        slow("expert=2,context=4,remat=full", DROPLESS),
        slow("expert=4,context=2", DROPLESS),
        slow("expert=4,context=2,remat=dots", DROPLESS),
        slow("expert=2,context=4", CAPACITY),
        slow("expert=2,context=4,context_mode=ulysses,remat=full", CAPACITY),
    ],
)
def test_a_layout_that_is_not_traced_holds_and_moves_what_its_trace_says(
    layout, kinds, monkeypatch
):
    # No policy but that of the layout.
    monkeypatch.setattr(
        planner_facts.Facts, "traced_with", lambda _, remat, __: (remat,)
    )
    layout, own = parse(layout), facts(**kinds)
    scaled, moved = own.layer(layout, 1.0, 1), moves(own, layout)
    monkeypatch.setattr(planner_facts, "law_of", lambda *_: None)
    own = facts(**kinds)
    assert scaled == pytest.approx(own.layer(layout, 1.0, 1), rel=1e-3)
    assert moved and moved == pytest.approx(moves(own, layout), rel=1e-3)


def moves(own, layout):
    """{what moves: bytes}."""
    found = LayerMoves(own).of(layout, layout.remat, True)
    return {
        str((x.kind, x.axes, x.why, x.backward)): x.runs * x.payload_bytes
        for x in found
    }


def test_heads_that_context_does_not_divide_are_traced():
    heads = frozenset({8, 4})
    assert law_of(exchange_of(parse("context=8")), heads)
    ulysses = exchange_of(parse("context=8,context_mode=ulysses"))
    assert law_of(ulysses, frozenset({8})) and not law_of(ulysses, heads)
    assert not law_of(ulysses, frozenset())
    assert not law_of(exchange_of(parse("context=8,context_mode=ring")), heads)
    assert facts().used.heads == {8}


def test_layouts_that_differ_in_other_axes_share_their_traces(monkeypatch):
    counts = {"layers": 0, "moves": 0}

    def counted(name, fn):
        def run(*args):
            counts[name] += 1
            return fn(*args)

        return run

    traced = counted("layers", planner_facts.trace_policies)
    monkeypatch.setattr(planner_facts, "trace_policies", traced)
    moves = counted("moves", layer_moves.layer_collectives)
    monkeypatch.setattr(layer_moves, "layer_collectives", moves)
    candidates = Candidates(facts(), machine_of(jax.devices()[:8]))
    for text in (
        "context=2,fsdp=4",
        "context=2,data=2,fsdp=2",
        "context=2,fsdp=2,tensor=2",
        "context=2,fsdp=4,microbatches=2",
        "context=4,fsdp=2",
        "context=4,tensor=2",
        "context=4,pipe=2,microbatches=2",
        "context=8",
    ):
        candidates.candidate(parse(text))
    # Two numbers of rows for context=2 and 4; one of each for what they move.
    assert counts == {"layers": 4, "moves": 2}
