"""The simulator: bytes as counted by hand and as compiled, and laws of its time."""

import itertools

import jax
import pytest
from support import graph_models
from support.graph_models import ADAM, Convolutional, machine

import meshpar
from meshpar.contracts.cost import wire_bytes
from meshpar.explain.report import explain
from meshpar.methods import flexflow

D, F, V, B = 32, 128, 64, 64


@pytest.fixture(scope="module")
def model():
    return graph_models.mlp(D, F, V)


@pytest.fixture(scope="module")
def batch():
    return graph_models.squares_batch(B, D, V)


def cost_of(strategies, **names):
    """The cost of the state that gives these names to the dims of parameters."""
    wanted = {f"layers/{n[1:]}/kernel": dims for n, dims in names.items()}
    state = [c.options.index(wanted[c.path]) for c in strategies.choices.all]
    return strategies.cost(tuple(state))


def test_data_parallelism_sums_every_gradient_once(model, batch):
    made = graph_models.strategies(model, batch, data=8)
    cost = made.cost(made.choices.data_parallel)
    gradients = wire_bytes("all_reduce", 4 * (D * F + F * V), 8)
    # The loss is one number more.
    assert 0 <= cost.seconds.wire_bytes - gradients <= wire_bytes("all_reduce", 4, 8)
    assert cost.seconds.activations < 1e-3 * cost.seconds.gradients


def test_columns_then_rows_sum_one_activation(model, batch):
    made = graph_models.strategies(model, batch, tensor=8)
    cost = cost_of(made, k0=(None, "tensor"), k1=("tensor", None))
    # The input has no gradient, so that the backward pass sums nothing.
    assert cost.seconds.wire_bytes == wire_bytes("all_reduce", 4 * B * V, 8)
    other = cost_of(made, k0=("tensor", None), k1=(None, "tensor"))
    assert other.seconds.wire_bytes > cost.seconds.wire_bytes
    half = cost_of(made, k0=(None, "tensor"), k1=(None, None))
    assert half.seconds.matmuls > cost.seconds.matmuls


def test_the_terms_add_up_and_faster_links_are_never_slower(model, batch):
    totals = []
    for bandwidth in (1e6, 1e9, 1e12):
        on = machine(link_bandwidth=bandwidth)
        made = graph_models.strategies(model, batch, on, data=2, tensor=4)
        cost = cost_of(made, k0=(None, "tensor"), k1=("tensor", None))
        assert sum(cost.seconds.by_term.values()) == cost.seconds.total
        totals.append(cost.seconds.total)
    assert totals == sorted(totals, reverse=True)


def test_gradients_travel_while_the_backward_pass_goes_on(batch):
    model = graph_models.mlp(D, *[F] * 4, V)
    seconds = {}
    for overlaps in (False, True):
        on = machine(link_bandwidth=1e7, overlaps=overlaps)
        made = graph_models.strategies(model, batch, on, data=8)
        seconds[overlaps] = made.cost(made.choices.data_parallel).seconds
    serial, beside = seconds[False], seconds[True]
    assert beside.wire_bytes == serial.wire_bytes
    assert serial.gradients == pytest.approx(serial.wire_bytes / 2e7, rel=1e-3)
    assert 0 < beside.gradients < serial.gradients


def test_a_loop_sends_what_its_body_sends_as_often_as_it_runs():
    kind = graph_models.Scanned
    model = meshpar.from_nnx(kind, graph_models.squares)
    batch = graph_models.squares_batch(B, kind.D, kind.D)
    made = graph_models.strategies(model, batch, tensor=8)
    names = {"embed/kernel": (None, None), "stack": (None, "tensor", None)}
    state = tuple(c.options.index(names[c.path]) for c in made.choices.all)
    activation = wire_bytes("all_reduce", 4 * B * kind.D, 8)
    # Each round sums its output, and gathers the gradient of its input; one gradient
    # is gathered or exchanged before and after the loop.
    sent = made.cost(state).seconds.wire_bytes
    rounds = kind.DEPTH * 1.5 * activation
    assert rounds <= sent <= rounds + activation


def test_zero_3_gathers_the_rows_of_a_stack_once_for_each_pass():
    kind = graph_models.Scanned
    model = meshpar.from_nnx(kind, graph_models.squares)
    batch = graph_models.squares_batch(B, kind.D, kind.D)
    names = {"embed/kernel": (None, None), "stack": (None, "fsdp", None)}
    sent, held = {}, {}
    for zero in (2, 3):
        made = graph_models.strategies(model, batch, zero=zero, fsdp=8)
        state = tuple(c.options.index(names[c.path]) for c in made.choices.all)
        cost = made.cost(state)
        sent[zero], held[zero] = cost.seconds.wire_bytes, cost.memory.weights
    size = 4 * kind.DEPTH * kind.D**2
    assert sent[3] - sent[2] == wire_bytes("all_gather", size, 8)
    assert held[2] - held[3] == size + 4 * kind.D**2  # Whole copies, or none.


MEGATRON = 'paths."0/kernel"=none/tensor,paths."1/kernel"=tensor/none'
COMPILED = (
    "data=8",
    "fsdp=8,zero=2,paths.kernel=fsdp/none",
    "data=2,fsdp=4,zero=2,paths.kernel=none/fsdp",
    f"tensor=8,{MEGATRON}",
    f"data=2,tensor=4,{MEGATRON}",
    'data=4,tensor=2,paths."0/kernel"=none/none,paths."1/kernel"=tensor/none',
    'data=2,fsdp=2,tensor=2,zero=2,paths."0/"=fsdp/tensor,paths."1/"=tensor/fsdp',
)


@pytest.fixture(scope="module")
def predicted_and_compiled(model, batch):
    found = {}
    for text in COMPILED:
        proposals = flexflow.search(model, ADAM, batch, jax.devices()[:8], require=text)
        program = meshpar.lower(model, ADAM, proposals.layout, batch)
        assert proposals.layout == meshpar.layouts.parse(text)
        sent = sum(row.found_bytes for row in explain(program).traffic)
        found[text] = proposals.fitting[0], sent, program.plan.bytes_per_device()
    return found


@pytest.mark.parametrize("text", COMPILED)
def test_traffic_is_that_of_the_compiled_program(predicted_and_compiled, text):
    proposal, sent, _ = predicted_and_compiled[text]
    # Loss and norm are a few numbers more.
    assert proposal.seconds.wire_bytes == pytest.approx(sent, rel=0.01, abs=256)


def test_layouts_come_in_the_order_of_the_traffic_compiled(predicted_and_compiled):
    pairs = itertools.combinations(predicted_and_compiled.values(), 2)
    for (one, sent, _), (other, also, _) in pairs:
        if abs(sent - also) > 0.02 * sent:
            assert (one.seconds.wire_bytes < other.seconds.wire_bytes) == (sent < also)


@pytest.mark.parametrize("text", COMPILED)
def test_state_is_that_of_the_plan(predicted_and_compiled, text):
    proposal, _, state = predicted_and_compiled[text]
    for kind in ("parameters", "optimizer", "gradients"):
        assert getattr(proposal.memory, kind) == state[kind], kind


def test_activations_grow_with_the_rows_and_shrink_with_their_split():
    model = meshpar.from_nnx(Convolutional, graph_models.squares)
    found = {}
    for rows, sizes in itertools.product((32, 64), ({"data": 8}, {"data": 4})):
        batch = graph_models.squares_batch(rows, 768, 8)
        sizes = sizes | {"expert": 8 // sizes["data"]}
        made = graph_models.strategies(model, batch, **sizes)
        dense = [c for c in made.choices.all if "dense/0" in c.path]
        state = [0] * len(made.choices.all)
        if dense:
            place = made.choices.all.index(dense[0])
            state[place] = dense[0].options.index((None, "expert"))
        found[rows, sizes["data"]] = made.cost(tuple(state)).memory.activations
    assert found[64, 8] == pytest.approx(2 * found[32, 8], rel=0.01)
    assert found[64, 4] == pytest.approx(2 * found[32, 4], rel=0.01)
