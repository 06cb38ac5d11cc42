"""Bytes that stages move over `pipe` are as declared, with a split vocabulary too."""

import dataclasses

import jax.numpy as jnp
import pytest
from support.marks import slow
from support.tiny_models import BATCH, LENGTH, lower, model

from meshpar.ops import vocabulary

EMBED = 32


def moved(program, kind):
    """(bytes that a program moves over pipe, bytes that are declared, their bounds)."""
    found = sum(
        c.payload_bytes * c.executions
        for c in program.collectives
        if c.axes == ("pipe",) and c.kind == kind
    )
    terms = [t for t in program.contract.terms if "pipe" in t.axes and t.kind == kind]
    exact = [t.payload_bytes for t in terms if t.axes == ("pipe",) and not t.bound]
    return found, sum(exact), sum(t.payload_bytes for t in terms if t.bound)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, block",
    [
        ("pipe=2,data=2,microbatches=4,vocab=pipe,schedule=gpipe", 8),
        ("pipe=2,fsdp=2,tensor=2,microbatches=4,vocab=pipe", 0),
        ("pipe=2,fsdp=2,tensor=2,microbatches=4", 0),
        ("pipe=2,tensor=2,microbatches=4,vocab=pipe", 4),
        ("pipe=2,tensor=4,microbatches=2,vocab=pipe,tick_loop=uniform", 0),
        ("pipe=2,context=2,tensor=2,microbatches=2,vocab=pipe", 0),
        ("pipe=2,tensor=2,microbatches=4,schedule=pipedream", 0),
        ("pipe=4,fsdp=2,zero=3,microbatches=4,vocab=pipe,save=residuals", 0),
    ],
)
def test_the_bytes_are_exact(layout, block):
    program = lower(layout, model(depth=4, loss_block=block))
    assert program.violations() == []
    found, declared, bounds = moved(program, "permute")
    assert found == declared > 0 == bounds
    found, declared, norm = moved(program, "all_reduce")
    assert norm == 8 * len(program.lowering.plan.gradients)
    assert declared <= found <= declared + norm


def test_a_tick_adds_up_four_activations_and_three_numbers_per_token():
    program = lower("pipe=2,microbatches=4,vocab=pipe")
    ticks, tokens = 4 + 2 - 1, BATCH // 4 * LENGTH
    x = tokens * EMBED * 4
    terms = program.contract.terms
    assert sorted(
        (t.count, t.payload_bytes)
        for t in terms
        if "vocab" in t.why or "of the embedding" in t.why
    ) == sorted(
        [(ticks, ticks * x)] * 2  # The embedding's rows, and their gradient.
        + [(4, 4 * x)] * 2  # The head's input, and its gradient.
        + [(4, 4 * 4 * tokens), (4, 4 * 8 * tokens), (4, 4 * 4)]
    )


@pytest.mark.slow
def test_rows_that_a_norm_reads_move_again(monkeypatch):
    """Its gradient needs them; that of a plain embedding does not."""
    lookup = vocabulary.lookup

    def normalized(w_VD, ids):
        x_D = lookup(w_VD, ids)
        return x_D / jnp.linalg.norm(x_D, axis=-1, keepdims=True)

    layout = "pipe=2,microbatches=4,vocab=pipe"
    plain = moved(lower(layout), "all_reduce")[1]
    monkeypatch.setattr(vocabulary, "lookup", normalized)
    program = lower(layout)
    assert program.violations() == []
    again = moved(program, "all_reduce")[1] - plain
    assert again == (4 + 2 - 1) * BATCH // 4 * LENGTH * EMBED * 4


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["head", slow("blocks")])
def test_gradients_that_train_nothing_may_be_left_out(trained):
    whole = model()
    params = {
        path: dataclasses.replace(param, trained=path.startswith(trained))
        for path, param in whole.params.items()
    }
    layout = "pipe=2,microbatches=2,vocab=pipe"
    program = lower(layout, dataclasses.replace(whole, params=params))
    assert program.violations() == []
