"""Bytes that a mixture of experts moves, by formula; what the axis refuses."""

import functools

import pytest
from support.equality import start
from support.marks import slow
from support.tiny_models import BATCH, LENGTH, batch, lower, model

import meshpar
from meshpar.collectives import transport
from meshpar.collectives.transport import Rings
from meshpar.errors import LayoutError
from meshpar.layouts.axes import EXPERT, TENSOR
from meshpar.ops.experts import dropless, exchange

EMBED, EXPERTS, PER_TOKEN, WAYS, DEPTH = 32, 8, 2, 4, 2


def moved(layout, *kinds, **options):
    """Bytes that collectives of some kinds send over `expert` in one step."""
    of = model(num_experts=EXPERTS, mlp=32, capacity_factor=1.0, **options)
    program = lower(layout, of)
    assert program.violations() == []
    kinds = [((EXPERT,), kind) for kind in kinds or ("all_to_all",)]
    terms = [t for t in program.contract.terms if (t.axes, t.kind) in kinds]
    found = [c for c in program.collectives if (c.axes, c.kind) in kinds]
    declared = sum(term.wire_bytes for term in terms)
    assert sum(c.wire_bytes for c in found) == declared
    return declared


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "times"), [("none", 4), ("full", 5), ("experts", 4)])
def test_bytes_of_capacity_routing_follow_the_formula(remat, times):
    tokens = BATCH * LENGTH // 4
    slots = PER_TOKEN * tokens  # Capacity factor 1: as many as there are choices.
    rows, weights = times * slots * EMBED, (times - 2) * slots
    wire = DEPTH * 4 * (rows + weights) * (WAYS - 1) / WAYS
    assert moved(f"expert={WAYS},remat={remat}") == wire


@pytest.mark.slow
def test_bytes_of_dropless_routing_follow_its_bound():
    slots = PER_TOKEN * BATCH * LENGTH // WAYS
    numbers = 4 * slots * EMBED + 2 * slots + EXPERTS
    wire = DEPTH * 4 * numbers * (WAYS - 1) / WAYS
    options = dict(routing="dropless", exchange_bound=1.0)
    assert moved(f"expert={WAYS}", **options) == wire


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "times"), [("none", 0), ("full", 1), ("experts", 0)])
def test_dropless_routing_without_a_bound_moves_tokens_and_not_their_copies(
    remat, times
):
    tokens = BATCH * LENGTH
    numbers = tokens * ((4 + times) * EMBED + (3 + 2 * times) * PER_TOKEN)
    kinds = "all_gather", "reduce_scatter"
    wire = DEPTH * 4 * numbers * (WAYS - 1) / WAYS
    layout = f"expert={WAYS},remat={remat}"
    assert moved(layout, *kinds, routing="dropless") == wire


@pytest.mark.slow
def test_tokens_around_rings_move_the_same_bytes(monkeypatch):
    """As on TPUs, for which every step is declared."""
    rings = Rings({EXPERT: (2, 2)})
    monkeypatch.setattr(exchange, "_transport", lambda: rings)
    monkeypatch.setattr(transport, "LARGE_BYTES", 0)
    numbers = BATCH * LENGTH * (4 * EMBED + 3 * PER_TOKEN)
    wire = DEPTH * 4 * numbers * (WAYS - 1) / WAYS
    assert moved(f"expert={WAYS}", "permute", routing="dropless") == wire


def moved_over_tensor(per_token, routing):
    of = model(
        num_experts=EXPERTS, mlp=32, experts_per_token=per_token, routing=routing
    )
    program = lower("fsdp=2,tensor=2", of)
    assert program.violations() == []
    found = [c for c in program.collectives if c.axes == (TENSOR,)]
    return sum(c.wire_bytes for c in found)


@pytest.mark.slow
@pytest.mark.parametrize("routing", [slow("capacity"), "dropless"])
def test_outputs_of_experts_are_combined_before_they_are_summed_over_tensor(routing):
    """One expert more for each token moves its number, its weight and a gradient."""
    one, four = (moved_over_tensor(number, routing) for number in (1, 4))
    tokens = BATCH * LENGTH // 2
    assert four - one == DEPTH * 4 * tokens * 3 * (4 - 1) / 2


@functools.cache
def bounded():
    return model(num_experts=EXPERTS, mlp=32, routing="dropless", exchange_bound=0.5)


@functools.cache
def evaluated(in_buffers):
    """Metrics of tokens that move in buffers, or all together."""
    with pytest.MonkeyPatch.context() as patch:
        if not in_buffers:
            patch.setattr(dropless, "_fits_buffers", lambda most, tokens: False)
        program = lower("expert=4", bounded())
        return program.evaluate(start(program), batch())


def test_choices_beyond_the_bound_are_counted():
    metrics = evaluated(in_buffers=True)
    assert 0.4 < float(metrics["experts_overflow"]) < 0.7
    assert float(metrics["experts_dropped"]) == float(metrics["experts_overflow"])


def test_a_bound_drops_the_same_choices_however_tokens_move():
    in_buffers = evaluated(in_buffers=True)
    for name, value in evaluated(in_buffers=False).items():
        assert float(value) == pytest.approx(float(in_buffers[name]), rel=1e-6), name


def test_a_dense_model_has_nothing_for_the_axis():
    with pytest.raises(LayoutError, match="expert=2 shards no parameter"):
        lower("expert=2")


@pytest.mark.slow
def test_replicas_that_train_apart_evaluate_as_one_device():
    of, mode = model(num_experts=EXPERTS, mlp=32), meshpar.LocalSGD(period=2)
    apart, alone = lower("replica=2,expert=2", of, mode=mode), lower("data=1", of)
    got = apart.evaluate(apart.init(0), batch())
    want = alone.evaluate(start(alone), batch())
    for name, value in want.items():
        assert float(got[name]) == pytest.approx(float(value), rel=1e-5)
