"""The operator graph: FLOPs as counted by hand, and how dims correspond."""

import jax
import jax.numpy as jnp
import pytest
from support import graph_models, tiny_models
from support.graph_models import Attention, Convolutional, Scanned, Towers

import meshpar
from meshpar.methods.flexflow.dims import WHOLE, dim_rule
from meshpar.methods.flexflow.reader import read_graph
from meshpar.methods.flexflow.step_trace import trace_step

B = 16


def graph_of(model, batch):
    return trace_step(model, graph_models.abstract(batch), None, {})


def steps(kind, inputs, outputs):
    model = meshpar.from_nnx(kind, graph_models.squares)
    return graph_of(model, graph_models.squares_batch(B, inputs, outputs))


def test_flops_of_a_chain_are_two_for_each_weight_and_row_and_pass():
    d, f, v = 8, 32, 16
    model = graph_models.mlp(d, f, v)
    graph = graph_of(model, graph_models.squares_batch(B, d, v))
    # Forward, gradients of weights, and of the input of all layers but the first.
    assert graph.flops == 2 * B * (2 * d * f + 3 * f * v)
    first, second = (graph.users[f"layers/{i}/kernel"] for i in range(2))
    assert (len(first), len(second)) == (1, 2)


def test_flops_of_towers_that_are_concatenated():
    d, e, f, v = Towers.D, Towers.E, Towers.F, Towers.V
    graph = steps(Towers, d + e, v)
    assert graph.flops == 2 * B * (2 * (d + e) * f + 3 * 2 * f * v)
    assert set(graph.users) == {"left/kernel", "right/kernel", "head/kernel"}


def test_flops_of_a_scan_count_every_round():
    n, d = Scanned.DEPTH, Scanned.D
    graph = steps(Scanned, d, d)
    assert graph.flops == 2 * B * d * d * (2 + 3 * n)
    assert len(graph.users["stack"]) == 2  # Forward and backward, one row at a time.


def test_flops_of_attention_hold_scores_and_their_product_with_values():
    length, d = Attention.L, Attention.D
    graph = steps(Attention, length * d, length * d)
    tokens = B * length
    # The input has no gradient: its three matmuls run twice, all others three times.
    matmuls = 2 * tokens * d * d * (3 * 2 + 3)
    assert graph.flops == matmuls + 3 * 2 * (2 * tokens * length * d)


def test_flops_of_convolutions_leave_out_the_holes_of_strides():
    graph = steps(Convolutional, 16 * 16 * 3, 8)
    first, second = 256 * 9 * 3 * 16, 64 * 9 * 16 * 16
    dense = 1024 * 2048 + 2048 * 8
    assert graph.flops == 2 * B * (2 * first + 3 * second + 3 * dense)


def test_what_is_rematerialized_counts_again():
    w = jnp.zeros((4, 4))

    def loss(w, x):
        return jax.checkpoint(lambda w: jnp.sin(jnp.sin(x @ w) @ w))(w).sum()

    def flops(fn):
        jaxpr = jax.make_jaxpr(fn)(w, w)
        return read_graph(jaxpr, {"params": {}, "batch": ()}, {}).flops

    plain, once = flops(loss), 2 * 4**3
    assert plain == 2 * once
    # Two products again, and those of two weights and one activation.
    assert flops(jax.value_and_grad(loss)) == 7 * once


def test_a_conditional_counts_its_heaviest_branch():
    def branches(w, x):
        return jax.lax.cond(x.sum() > 0, lambda: x @ w, lambda: x)

    jaxpr = jax.make_jaxpr(branches)(jnp.zeros((4, 4)), jnp.zeros((4, 4)))
    assert read_graph(jaxpr, {"params": {}, "batch": ()}, {}).flops == 2 * 4**3


def rule(fn, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return dim_rule(jax.make_jaxpr(fn)(*args).eqns[-1])


def test_a_matmul_shares_factors_and_sums_the_contracted_dim():
    found = rule(jnp.matmul, (4, 8), (8, 2))
    (rows, contracted), (other, columns) = found.operands
    assert contracted == other and found.results == ((rows, columns),)


RESHAPES = (
    ((8, 4), (8, 2, 2), [(0, 0), (1, 1)]),
    ((8, 2, 2), (8, 4), [(0, 0), (1, 1)]),
    ((6, 4), (3, 8), [(0, 0)]),
    ((1, 8), (8,), [(1, 0)]),
)


@pytest.mark.parametrize(("before", "after", "same"), RESHAPES)
def test_a_reshape_keeps_the_first_dim_of_each_group(before, after, same):
    found = rule(lambda x: x.reshape(after), before)
    (operand,), (result,) = found.operands, found.results
    pairs = [
        (i, j)
        for i, factor in enumerate(operand)
        for j, other in enumerate(result)
        if factor == other != WHOLE
    ]
    assert pairs == same


def test_a_lookup_sums_over_the_dim_that_is_indexed():
    ids = jnp.zeros((4, 5), jnp.int32)
    found = rule(lambda w: w[ids], (16, 8))
    rows, embed = found.operands[0]
    assert embed == found.results[0][2] and rows not in (WHOLE, *found.results[0])


def test_constraints_show_the_names_of_the_model():
    model = tiny_models.plain_model()
    graph = graph_of(model, tiny_models.batch())
    targets = [op.target for op in graph.operators if op.target]
    assert (("dim:batch",), ("dim:length",), ("dim:mlp",)) in targets
