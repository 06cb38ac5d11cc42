"""Larger sizes of `context`, which planners do not trace, against traces of them."""

import jax
import optax
import pytest
from support.tiny_models import batch, model

from meshpar.layouts import Layout, parse
from meshpar.mesh.machine import machine_of
from meshpar.planner import facts as planner_facts
from meshpar.planner import layer_moves
from meshpar.planner.candidate import Candidates
from meshpar.planner.facts import Facts
from meshpar.planner.layer_moves import LayerMoves


def facts():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
    return Facts(model(depth=4), optax.adamw(1e-2), shapes, None, jax.devices())


@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_size_that_is_not_traced_holds_and_moves_what_its_trace_says(
    remat, monkeypatch
):
    layout = Layout(context=8)
    own = facts()
    scaled, moved = own.layer(layout, 1.0, 1), LayerMoves(own).of(layout, remat, True)
    for module in (planner_facts, layer_moves):
        monkeypatch.setattr(module, "follows", lambda _: False)
    own = facts()
    assert own.layer(layout, 1.0, 1) == scaled
    traced = LayerMoves(own).of(layout, remat, True)
    assert traced and key(traced) == key(moved)


def key(moves):
    return sorted((x.kind, x.why, x.backward, x.runs * x.payload_bytes) for x in moves)


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
