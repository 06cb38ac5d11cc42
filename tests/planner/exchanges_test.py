"""Layouts whose exchanges planners do not trace, against traces of them."""

import jax
import optax
import pytest
from support.marks import slow
from support.tiny_models import LENGTH, batch, model

from meshpar.layouts import parse
from meshpar.mesh.machine import machine_of
from meshpar.planner import facts as planner_facts
from meshpar.planner import layer_moves
from meshpar.planner.candidate import Candidates
from meshpar.planner.exchanges import exchange_of, law_of
from meshpar.planner.facts import Facts
from meshpar.planner.layer_moves import LayerMoves

DROPLESS = {"num_experts": 4, "routing": "dropless", "mlp": 8, "length": 8192}
"""Beside so many tokens, the copies of experts that devices hold are small."""

FEW_TOKENS = DROPLESS | {"length": LENGTH}
EIGHT, SIXTEEN = (DROPLESS | {"num_experts": n} for n in (8, 16))
"""On eight devices a token's two choices are on one device of SIXTEEN, not of EIGHT."""

CAPACITY = EIGHT | {"routing": "capacity"}


def facts(**kinds):
    own, length = model(depth=4, **kinds), kinds.get("length", LENGTH)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((len(x), length), x.dtype), batch()
    )
    return Facts(own, optax.adamw(1e-2), shapes, None, jax.devices())


@pytest.mark.parametrize(
    "layout, kinds",
    [
        ("context=8", {}),
        slow("context=8,remat=full", {}),
        slow("context=8,context_mode=ulysses", {}),
        slow("context=8,context_mode=ulysses,remat=full", {}),
        slow("context=8,context_mode=ulysses,remat=dots", {"kv_heads": 2}),
        slow("expert=2,context=4,remat=full", DROPLESS),
        slow("expert=4,context=2", DROPLESS),
        slow("expert=4,context=2,remat=dots", DROPLESS),
        slow("expert=4,context=2", FEW_TOKENS),
        slow("expert=2,context=4,context_mode=ulysses,remat=experts", DROPLESS),
        ("expert=8,remat=experts", SIXTEEN),
        slow("expert=8,remat=full", SIXTEEN),
        slow("expert=8,remat=experts", EIGHT),
        slow("expert=8,remat=dots", EIGHT),
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
    held = own.layer(layout, 1.0, 1)._asdict()
    assert scaled._asdict() == pytest.approx(held, rel=1e-3)
    assert moved and moved == pytest.approx(moves(own, layout), rel=1e-3)


def moves(own, layout):
    """{what moves, and whether the layer's output is read: bytes}."""
    return {
        str((output, x.kind, x.axes, x.why, x.backward)): x.runs * x.payload_bytes
        for output in (True, False)
        for x in LayerMoves(own).of(layout, layout.remat, output)
        # Where the output is not read, a law may count a sum of a few numbers too many.
        if output or x.why != "statistics of experts"
    }


def traced(text, **kinds):
    """Whether what a layer holds, and what it moves, have to be traced."""
    own, exchange = facts(**kinds), exchange_of(parse(text))
    return tuple(own.law_of(exchange, moves=moves) is None for moves in (False, True))


def test_heads_that_context_does_not_divide_are_traced():
    ulysses = "context=8,context_mode=ulysses"
    assert not any(traced("context=8") + traced(ulysses) + traced(ulysses, kv_heads=2))
    assert all(traced(ulysses, kv_heads=4) + traced("context=8,context_mode=ring"))
    assert facts().used.heads == {8}
    exchange = exchange_of(parse(ulysses))
    assert not law_of(exchange, frozenset())
    assert not law_of(exchange, frozenset({8, 4}))
    assert not law_of(exchange, frozenset({8, 2}))  # Each by itself would follow.


def test_experts_whose_rows_do_not_grow_with_their_devices_are_traced():
    assert traced("expert=8", **SIXTEEN) == (False, False)
    assert traced("expert=8", **EIGHT) == (True, False)
    assert traced("expert=8", **SIXTEEN | {"exchange_bound": 1.5}) == (True, True)
    assert traced("expert=8", **CAPACITY) == (True, True)
    assert traced("expert=4", **SIXTEEN) == (True, True)
    assert traced("expert=2,context=2", **EIGHT) == (False, False)
    assert traced("expert=2,context=2", **CAPACITY) == (True, True)


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
