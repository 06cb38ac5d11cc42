"""The search: its best state is the best of all, and follows links and memory."""

import dataclasses

import jax
import pytest
from support import graph_models
from support.graph_models import machine

import meshpar
from meshpar.layouts.resolve import make_plan
from meshpar.methods import flexflow
from meshpar.methods.flexflow.choices import path_rules
from meshpar.methods.flexflow.markov import ILLEGAL, MarkovSearch, exhaustive
from meshpar.methods.flexflow.step_trace import trace_step

B = 32
SMALL = {
    "chain": (graph_models.mlp(16, 64, 64, 32), 16, 32),
    "towers": (meshpar.from_nnx(graph_models.Towers, graph_models.squares), 48, 8),
    "scan": (meshpar.from_nnx(graph_models.Scanned, graph_models.squares), 16, 16),
    "six": (graph_models.mlp(16, 32, 64, 32, 64, 32, 16), 16, 16),
}
MESHES = {"tensor": {"tensor": 8}, "mixed": {"data": 2, "expert": 2, "fsdp": 2}}


CASES = [(name, mesh) for name in SMALL for mesh in MESHES]
CASES.remove(("six", "mixed"))  # Too many states to try them all.


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_chains_find_the_best_of_all_states(name, mesh):
    model, inputs, outputs = SMALL[name]
    batch = graph_models.squares_batch(B, inputs, outputs)
    on = machine(link_bandwidth=1e8)
    made = graph_models.strategies(model, batch, on, **MESHES[mesh])
    least, _ = min(exhaustive(made.choices.all, made.price))
    starts = made.choices.data_parallel, made.choices.by_default_rules
    for seed in range(3):
        search = MarkovSearch(made.choices.all, made.price, 1000, seed)
        found = search.chains(starts)
        assert found.cost == made.price(found.state) == least < ILLEGAL, seed


def test_a_seed_finds_the_same_state_again():
    model, inputs, outputs = SMALL["towers"]
    batch = graph_models.squares_batch(B, inputs, outputs)
    made = graph_models.strategies(model, batch, tensor=8)
    start = [made.choices.data_parallel]
    found = [MarkovSearch(made.choices.all, made.price, 40).run(start) for _ in "ab"]
    assert found[0] == found[1] and found[0].proposals <= 2 * 40


def test_every_cost_is_that_of_a_layout_that_the_resolver_takes():
    """And a state without a cost is refused by it, or by what compilers do."""
    model, inputs, outputs = SMALL["towers"]
    batch = graph_models.squares_batch(B, inputs, outputs)
    made = graph_models.strategies(model, batch, fsdp=4, tensor=2)
    params = {
        path: jax.ShapeDtypeStruct(p.shape, p.dtype) for path, p in model.params.items()
    }
    optimizer = jax.eval_shape(graph_models.ADAM.init, params)
    for _, state in exhaustive(made.choices.all, made.price):
        layout = made.choices.layout(state)
        assert meshpar.layouts.parse(str(layout)) == layout
        cost = made.cost(state)
        if cost is None:
            with pytest.raises(meshpar.errors.LayoutError, match="shards no parameter"):
                make_plan(layout, model.params, optimizer)
        else:
            size = make_plan(layout, model.params, optimizer).bytes_per_device()
            for kind in ("parameters", "optimizer", "weights", "gradients"):
                assert getattr(cost.memory, kind) == size[kind], (layout, kind)


def best(model, batch, on, graph, **sizes):
    made = graph_models.strategies(model, batch, on, graph, **sizes)
    search = MarkovSearch(made.choices.all, made.price, 150)
    state = search.run([made.choices.data_parallel]).state
    return made.cost(state).seconds, made.choices.names_of(state)


def test_slow_links_split_a_large_dense_layer_as_the_bytes_say():
    """Data parallelism sends gradients, a split sends activations."""
    rows, wide = 16, 1024
    model = graph_models.mlp(32, wide, wide, 8)
    batch = graph_models.squares_batch(rows, 32, 8)
    graph = trace_step(model, graph_models.abstract(batch), None, {})
    chosen = {}
    for bandwidth in (1e6, 1e15):
        on = machine(link_bandwidth=bandwidth, memory_bandwidth=1e15)
        replicas, _ = best(model, batch, on, graph, data=8)
        split, names = best(model, batch, on, graph, tensor=8)
        chosen[bandwidth] = split.total < replicas.total
        assert "tensor" in names["layers/1/kernel"]
        assert split.wire_bytes < replicas.wire_bytes / 10
    # With fast links transfers take no time, so that layouts of equal compute tie.
    assert chosen[1e6]
    on = machine(link_bandwidth=1e6, memory_bandwidth=1e15)
    many = graph_models.squares_batch(4096, 32, 8)
    replicas, _ = best(model, many, on, None, data=8)
    split, _ = best(model, many, on, None, tensor=8)
    assert replicas.wire_bytes < split.wire_bytes and replicas.total < split.total


def test_convolutions_split_rows_and_dense_layers_split_weights():
    """One weird trick: `expert` splits the rows and holds the dense layers' weights."""
    model = meshpar.from_nnx(graph_models.Convolutional, graph_models.squares)
    batch = graph_models.squares_batch(64, 768, 8)
    on = machine(link_bandwidth=1e9)
    graph = trace_step(model, graph_models.abstract(batch), None, {})
    plain, _ = best(model, batch, on, graph, data=8)
    found, names = best(model, batch, on, graph, expert=8)
    assert found.total < 0.5 * plain.total and found.wire_bytes < plain.wire_bytes / 4
    for path, dims in names.items():
        assert ("expert" in dims) == path.startswith("dense/0") or "dense/1" in path


def test_memory_is_a_limit_and_less_of_it_is_never_faster():
    model = graph_models.mlp(64, 512, 64)
    batch = graph_models.squares_batch(64, 64, 64)
    devices, seconds = jax.devices()[:4], []
    roomy = flexflow.search(model, graph_models.ADAM, batch, devices)
    sizes = [c.memory.total for c in (*roomy.fitting, *roomy.too_large)]
    for budget in (max(sizes), (min(sizes) + max(sizes)) // 2, min(sizes)):
        found = flexflow.search(model, graph_models.ADAM, batch, devices, memory=budget)
        assert all(p.memory.total <= budget for p in found.fitting)
        assert all(p.memory.total > budget for p in found.too_large)
        seconds.append(found.fitting[0].seconds.total)
    assert seconds == sorted(seconds)
    with pytest.raises(meshpar.errors.LayoutError, match="the smallest, .* needs"):
        flexflow.search(model, graph_models.ADAM, batch, devices, memory=10_000)


def test_chains_end_where_the_memory_suffices():
    model, inputs, outputs = SMALL["chain"]
    batch = graph_models.squares_batch(B, inputs, outputs)

    def states(**limit):
        on = machine(link_bandwidth=1e8, **limit)
        return graph_models.strategies(model, batch, on, tensor=8)

    roomy = states()
    fast, state = min(exhaustive(roomy.choices.all, roomy.price))
    tight = states(memory_bytes=roomy.cost(state).memory.total - 1)
    least, _ = min(exhaustive(tight.choices.all, tight.price))
    # It starts where the memory does not suffice, and at the fastest state of all.
    for start in (tight.choices.data_parallel, state):
        assert not tight.cost(start) or not tight.fits(tight.cost(start))
        found = MarkovSearch(tight.choices.all, tight.price, 1000).chains([start])
        assert found.cost == least > fast and tight.fits(tight.cost(found.state))


def test_rules_share_a_regex_only_where_it_matches_nothing_else():
    param = graph_models.mlp(4, 4).params["layers/0/kernel"]
    params = dict.fromkeys(("a/0/w", "a/1/w", "a/2/w", "b"), param)
    names = dict.fromkeys(("a/0/w", "a/1/w", "a/2/w"), ("tensor", None))
    assert dict(path_rules(names, params)) == {r"^a/\d+/w$": ("tensor", None)}
    names["a/1/w"] = (None, None)
    rules = dict(path_rules(names, params))
    assert rules == {"^(a/0/w|a/2/w)$": ("tensor", None), "^a/1/w$": (None, None)}
    params["b"] = dataclasses.replace(param, names=("embed", None))
    assert dict(path_rules(names, params)) == rules
