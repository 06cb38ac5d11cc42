"""Bytes that attention over split sequences moves, by formula; what is refused."""

import jax
import numpy as np
import optax
import pytest
from support import equality
from support.marks import slow
from support.tiny_models import BATCH, LENGTH, batch, lower, model

import meshpar
from meshpar.collectives.transport import Rings, Transports
from meshpar.errors import LayoutError
from meshpar.layouts.axes import CONTEXT
from meshpar.layouts.token_order import device_order
from meshpar.ops.context import gathered

HEADS, KV_HEADS, HEAD_DIM, WAYS, DEPTH = 8, 2, 4, 4, 2
KV = 2 * BATCH * LENGTH * KV_HEADS * HEAD_DIM * 4
"""Bytes of the keys and values of whole sequences, in one layer."""

SENT = KV * (WAYS - 1) / WAYS
EXCHANGED = BATCH * LENGTH * HEAD_DIM * 4 * 2 * (HEADS + 4) * (WAYS - 1) / WAYS**2
"""Queries and outputs, keys and values repeated to four heads."""


HOP = KV / WAYS
"""The first one of a ring that runs again goes with that of the backward pass."""


@pytest.mark.parametrize(
    ("options", "wire", "merged"),
    [
        slow("context_mode=allgather", 2 * SENT, 0),
        ("context_mode=allgather,remat=full", 3 * SENT, 0),
        slow("context_mode=ulysses", 2 * EXCHANGED, 0),
        slow("context_mode=ulysses,remat=dots", 3 * EXCHANGED, 0),
        slow("context_mode=ring", 2 * SENT + KV, 0),
        slow("context_mode=ring,context_order=striped", 2 * SENT + KV, 0),
        slow("context_mode=ring,remat=full", 3 * SENT + KV, HOP),
    ],
)
def test_bytes_follow_the_formula(options, wire, merged):
    program = lower(f"context={WAYS},{options}", model(kv_heads=KV_HEADS))
    assert program.violations() == []
    kinds = {"all_gather", "reduce_scatter", "all_to_all", "permute"}
    terms = [t for t in program.contract.terms if t.kind in kinds]
    found = [c for c in program.collectives if c.kind in kinds]
    assert {t.axes for t in terms} == {c.axes for c in found} == {(CONTEXT,)}
    assert sum(term.wire_bytes for term in terms) == DEPTH * wire
    assert sum(c.wire_bytes for c in found) == DEPTH * (wire - merged)


@pytest.fixture
def around_rings(monkeypatch):
    """A program as on TPUs: a few heads at a time, with every step declared."""
    found = Transports(gradients=Rings({CONTEXT: (2, 2)}), widens=True)
    monkeypatch.setattr(gathered, "transports_for", lambda mesh, axes: found)
    return lower(f"context={WAYS}", model(kv_heads=KV_HEADS))


def test_keys_go_around_rings_where_weights_do_not(around_rings):
    """After one collective, TPUs copy whole keys into other orders."""
    kinds = {term.kind for term in around_rings.contract.terms if CONTEXT in term.axes}
    assert "permute" in kinds and not kinds & {"all_gather", "reduce_scatter"}


@pytest.mark.slow
def test_keys_around_rings_move_the_same_bytes(around_rings):
    program = around_rings
    assert program.violations() == []
    moves = [c for c in program.collectives if c.kind == "permute"]
    assert sum(c.wire_bytes for c in moves) == DEPTH * 2 * SENT
    whole = lower("data=1", model(kv_heads=KV_HEADS))
    report = equality.compare(program, whole, [batch()])
    assert report.ok, report.problem


def test_neighbours_on_a_ring_swap_heads():
    """Half of the heads and all their tokens: half the hops, each of the same size."""
    options = f"context={WAYS},context_mode=ring,context_heads=2"
    program = lower(options, model(kv_heads=KV_HEADS))
    assert program.violations() == []
    swaps = [c for c in program.collectives if c.kind == "all_to_all"]
    assert all(c.partial and c.group_size == 2 for c in swaps)
    swapped = BATCH * LENGTH / WAYS * HEAD_DIM * 4 * (2 * HEADS + 2 * KV_HEADS)
    assert sum(c.wire_bytes for c in swaps) == DEPTH * 2 * swapped / 2
    hops = sum(c.wire_bytes for c in program.collectives if c.kind == "permute")
    assert hops == DEPTH * (1 + 1 + 2) * KV / WAYS


@pytest.mark.slow
def test_predicted_activations_fall_with_the_length():
    """But for the keys and values that allgather holds."""
    whole, split = (
        lower(f"context={ways},context_mode=ring", model()).lowering.memory(batch())
        for ways in (2, 4)
    )
    assert split.activations == pytest.approx(whole.activations / 2, rel=0.01)


def test_lengths_that_cannot_be_split_are_refused():
    with pytest.raises(LayoutError, match="dim 1 does not divide over context=3"):
        lower("context=3")
    data = batch() | {"weights": np.ones((BATCH, LENGTH // 2), np.float32)}
    with pytest.raises(LayoutError, match=r"have the lengths \[8, 16\]"):
        meshpar.lower(
            model(), optax.sgd(0.1), "context=2", data, devices=jax.devices()[:2]
        )


def test_a_model_with_positions_of_its_own_is_left_to_the_compiler():
    flax = model("linen")
    with pytest.raises(LayoutError, match="positions are counted.*or use lowering=jit"):
        lower("context=2", flax)
    assert lower("context=2", flax, lowering="jit").violations() == []


@pytest.mark.slow
def test_tokens_are_dealt_out_once():
    """Arrays that lie on devices already are those of place_batch, or refused."""
    program = lower("context=4")
    state = program.init()
    placed = program.place_batch(batch())
    places = device_order("zigzag", LENGTH, 4)
    np.testing.assert_array_equal(placed["tokens"], batch()["tokens"][:, places])
    state, metrics = program.step(state, placed)
    assert metrics["loss"] > 0
    strange = jax.device_put(batch(), jax.tree.map(lambda x: x.sharding, placed))
    with pytest.raises(LayoutError, match="zigzag needs tokens in another order"):
        program.step(state, strange)
    predict = program.predictor(lambda decoder, batch: decoder(batch["tokens"]))
    with pytest.raises(LayoutError, match="predict needs tokens in their own order"):
        predict(state.params, placed)
    contiguous = lower("context=4,context_order=contiguous")
    assert contiguous.evaluate(contiguous.init(), strange)["loss"] > 0


def test_orders_that_do_not_fit_are_refused():
    short = {name: x[:, :8] for name, x in batch().items()}
    with pytest.raises(LayoutError, match=r"2\*context=16 parts of context_order"):
        meshpar.lower(model(), optax.sgd(0.1), "context=8", short)
    with pytest.raises(LayoutError, match="striped: under lowering=jit the model sees"):
        lower("context=4,context_order=striped", lowering="jit")
