"""Embedding and head whose vocabulary `tensor` splits: values, gradients and moves.

That whole models train as on one device is in `matrix_test`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.marks import slow
from support.tiny_models import BATCH, LENGTH, lower, model

from meshpar.layouts import parse
from meshpar.mesh.mesh import make_mesh
from meshpar.models.model_scope import model_scope
from meshpar.ops import vocabulary

ROWS, TOKENS, DIM, VOCAB = 2, 8, 16, 32
LAYOUT = parse("tensor=4")


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    ids, targets = rng.integers(0, VOCAB, (2, ROWS, TOKENS), np.int32)
    w_VD = rng.normal(size=(VOCAB, DIM)).astype(np.float32)
    scale = rng.normal(size=(ROWS, TOKENS)).astype(np.float32)
    return ids, targets, w_VD, scale


def run(fn, *args):
    """(value, gradients) of a function under the layout, and without one."""
    grad = jax.value_and_grad(fn, argnums=(0, 1))
    mesh = make_mesh(LAYOUT, jax.devices()[:4])

    def under_layout(*args):
        with model_scope(LAYOUT, mesh):
            return grad(*args)

    with jax.set_mesh(mesh):
        ours = jax.jit(under_layout)(*args)
    return ours, jax.jit(grad)(*args)


@pytest.mark.parametrize("block", [0, 2, 8])
def test_values_and_gradients_are_those_of_plain_functions(arrays, block):
    ids, targets, w_VD, scale = arrays

    def loss(w_VD, w_DV):
        x_BLD = vocabulary.lookup(w_VD, ids)
        losses_BL = vocabulary.head_losses(jnp.tanh(x_BLD), w_DV, targets, block)
        return jnp.sum(scale * losses_BL)

    # Logits so large that the exponential of one overflows.
    ours, plain = run(loss, w_VD, 60 * w_VD.T)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4), ours, plain
    )


def outside(layout, **fields):
    """[(kind, count, bytes)] that embedding and head declare over `tensor`."""
    terms = lower(layout, model(**fields)).contract.terms
    words = "of the embedding", "of the head", "over slices of the vocabulary"
    return sorted(
        (term.kind, term.count, term.payload_bytes)
        for term in terms
        if any(word in term.why for word in words)
    )


@pytest.mark.parametrize("block", [0, slow(4)])
def test_moves_are_those_of_megatron_whatever_the_block(block):
    whole = BATCH // 2 * LENGTH * 32 * 4
    token = BATCH // 2 * LENGTH * 4
    assert outside("fsdp=2,tensor=2", loss_block=block) == [
        ("all_gather", 1, whole),
        ("all_gather", 1, whole),
        ("all_reduce", 1, token),
        ("all_reduce", 1, 2 * token),
        ("reduce_scatter", 1, whole),
        ("reduce_scatter", 1, whole),
    ]


def test_pipelines_run_them_in_every_tick():
    whole, token = BATCH // 2 * LENGTH * 32 * 4, BATCH // 2 * LENGTH * 4
    assert outside("pipe=2,tensor=2,microbatches=2") == [
        ("all_gather", 2, 2 * whole),  # Of the head, for each microbatch.
        ("all_gather", 3, 3 * whole),
        ("all_reduce", 2, 2 * token),
        ("all_reduce", 2, 4 * token),
        ("reduce_scatter", 2, 2 * whole),
        ("reduce_scatter", 3, 3 * whole),
    ]


@pytest.mark.parametrize(
    "layout",
    [
        "tensor=2,params.vocab=none,activations.vocab=none",
        slow("tensor=2,activations.residual_length=none"),
    ],
)
def test_elsewhere_the_compiler_moves_them_within_a_bound(layout):
    program = lower(layout)
    assert outside(layout) == []
    assert any("gathers of" in term.why for term in program.contract.terms)


def test_what_is_left_to_the_compiler_is_gradients_of_whole_weights():
    terms = lower("fsdp=2,tensor=2").contract.terms
    (bound,) = [t for t in terms if t.bound and t.axes == ("tensor",)]
    # The scales of two norms a layer, and of the last one, of 32 features each.
    assert bound.payload_bytes == 2 * (2 - 1) / 2 * 5 * 32 * 4


@pytest.mark.parametrize("trained", [slow("head"), slow("embedding"), "blocks"])
def test_gradients_that_train_nothing_may_be_left_out(trained):
    whole = model()
    params = {
        path: dataclasses.replace(param, trained=path.startswith(trained))
        for path, param in whole.params.items()
    }
    program = lower("fsdp=2,tensor=2", dataclasses.replace(whole, params=params))
    assert program.violations() == []
