"""The residuals that the scan over layers saves for its backward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.marks import slow

from meshpar.fsdp.differentiable_scan import Segment, differentiable
from meshpar.fsdp.layer_scan import LayerScan
from meshpar.fsdp.rows import Rows
from meshpar.layouts.remat import wrap_remat

DEPTH, ROWS, EMBED, SEEN = 3, 4, 8, 5


def layer(weights, x, number, context, stacks=None):
    """Mixes what it passes on into its activations, where the context says so."""
    del number, stacks
    x_BD, seen_BM = x
    y_BD = jnp.tanh(x_BD @ weights["w"]) + seen_BM @ (seen_BM.T @ x_BD)
    return jnp.where(context, y_BD, x_BD), seen_BM


def scan(remat, context, kept=lambda x: x[1:]):
    wrapped = wrap_remat(layer, remat, prevent_cse=False)
    return LayerScan(wrapped, lambda a, b: a | b, lambda g: g, context, kept)


def arguments():
    rng = np.random.default_rng(0)
    shapes = (DEPTH, EMBED, EMBED), (ROWS, EMBED), (ROWS, SEEN)
    w, x, seen = (jnp.float32(rng.normal(size=shape)) for shape in shapes)
    return {"w": w}, (x, seen), jnp.asarray(rng.random((ROWS, EMBED)) > 0.5)


@pytest.mark.parametrize("remat, per_layer", [("full", {EMBED}), ("none", None)])
def test_context_and_kept_activations_are_saved_once(remat, per_layer):
    def saved(weights, x, context):
        rows = Rows(0, jnp.arange(DEPTH))
        return scan(remat, context).forward(weights, {}, x, rows)[1]

    residuals = jax.eval_shape(saved, *arguments())
    assert [x.shape for x in residuals.kept] == [(ROWS, SEEN)]
    arrays = residuals.layers.arrays
    assert all(x.shape[0] == DEPTH for x in arrays)
    assert not any(x.shape[1:] == (ROWS, SEEN) for x in arrays)
    assert not any(x.dtype == bool for x in arrays)
    if per_layer is not None:
        assert {x.shape[-1] for x in arrays} == per_layer


@pytest.mark.parametrize("remat", ["full", "none"])
def test_gradients_pass_through_kept_activations(remat):
    def plain(weights, x, context):
        for w in weights["w"]:
            x = layer({"w": w}, x, 0, context)
        return x[0].sum()

    def scanned(weights, x, context):
        return differentiable(Segment(scan(remat, context), DEPTH))(weights, {}, x)[
            0
        ].sum()

    got, want = (
        jax.jit(jax.grad(fn, argnums=(0, 1)))(*arguments()) for fn in (scanned, plain)
    )
    for own, expected in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        error = np.linalg.norm(own - expected) / np.linalg.norm(expected)
        assert error < 1e-5


# Several segments of one stack, each with a scan of its own.

MIXES = [slow((1, 2)), (2, 1), (1, 1, 1)]


def in_segments(counts, context, kept=lambda x: x[1:]):
    """The stack in segments whose policies alternate."""
    scans = (scan(("full", "none")[i % 2], context, kept) for i in range(len(counts)))
    return differentiable(*map(Segment, scans, counts))


@pytest.mark.parametrize("counts", MIXES)
def test_segments_are_the_stack(counts):
    def loss(run, weights, x):
        y, seen = run(weights, {}, x)
        return (y**2).sum() + seen.sum(), y

    weights, x, context = arguments()
    whole = differentiable(Segment(scan("none", context), DEPTH))
    got, want = (
        jax.jit(
            jax.value_and_grad(lambda w, x, run=run: loss(run, w, x), (0, 1), True)
        )(weights, x)
        for run in (in_segments(counts, context), whole)
    )
    for own, expected in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        error = np.linalg.norm(own - expected) / np.linalg.norm(expected)
        assert error < 1e-5


def test_segments_give_every_layer_its_number_and_its_weights():
    def numbered(weights, x, number, context, stacks):
        return x * weights["w"] + number

    one = LayerScan(numbered, lambda a, b: a | b, lambda g: g)
    weights = {"w": jnp.float32([2, 3, 5])}
    run = differentiable(Segment(one, 1), Segment(one, 2))
    y, vjp = jax.vjp(lambda w: run(w, {}, jnp.float32(7)), weights)
    assert y == ((7 * 2 + 0) * 3 + 1) * 5 + 2
    assert vjp(jnp.float32(1))[0]["w"].tolist() == [7 * 3 * 5, 14 * 5, 43]


def test_segments_keep_what_all_layers_pass_on_once():
    weights, x, context = arguments()
    run = in_segments((1, 2), context)
    jaxpr = jax.make_jaxpr(lambda w, x: jax.vjp(lambda w: run(w, {}, x), weights)[1])
    kept = [v.aval.shape for v in jaxpr(weights, x).jaxpr.outvars]
    assert kept.count((ROWS, SEEN)) == 1


WIDE, DIM = 8, 128  # A stack of matrices that outweighs all else.


def of_wide_layers(*counts):
    """A stack of wide layers in segments, which are computed again."""

    def simple(weights, x, number, context, stacks):
        return jnp.tanh(x @ weights["w"])

    wrapped = wrap_remat(simple, "full", prevent_cse=False)
    one = LayerScan(wrapped, lambda a, b: a | b, lambda g: g)
    return differentiable(*(Segment(one, n) for n in counts))


def temporary(fn, *args):
    """Bytes of temporaries that a compiled function takes."""
    compiled = jax.jit(fn).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_segments_write_gradients_without_a_second_copy_of_the_stack():
    """Two segments take as much memory as one, but for part of one layer."""
    layer = 4 * DIM * DIM

    def taken(*counts):
        run = of_wide_layers(*counts)
        step = jax.grad(lambda w, x: run(w, {}, x).sum())
        norm = lambda w, x: (step(w, x)["w"] ** 2).sum()  # noqa: E731
        return temporary(norm, {"w": jnp.zeros((WIDE, DIM, DIM))}, jnp.zeros((2, DIM)))

    assert taken(8) > WIDE * layer
    assert taken(3, 5) < taken(8) + 2 * layer


@pytest.mark.parametrize("counts", [slow((8,)), (3, 5)])
def test_gradients_are_added_to_sums_and_have_no_stack_of_their_own(counts):
    run, rng = of_wide_layers(*counts), np.random.default_rng(0)
    weights = {"w": jnp.float32(rng.normal(size=(WIDE, DIM, DIM)) * DIM**-0.5)}
    xs = jnp.float32(rng.normal(size=(3, 2, DIM)))

    def plain(weights, x):
        for w in weights["w"]:
            x = jnp.tanh(x @ w)
        return x.sum()

    def apart(sums, x):
        new = jax.grad(lambda w: run(w, {}, x).sum())(weights)
        return jax.tree.map(jnp.add, sums, new), None

    def in_place(sums, x):
        return jax.grad(lambda sums: run(weights, {}, x, sums).sum())(sums), None

    zeros = jax.tree.map(jnp.zeros_like, weights)
    got, _ = lax.scan(in_place, zeros, xs)
    want = sum(jax.grad(plain)(weights, x)["w"] for x in xs)
    assert np.linalg.norm(got["w"] - want) < 1e-6 * np.linalg.norm(want)
    stack, layer = 4 * WIDE * DIM * DIM, 4 * DIM * DIM
    more, less = (
        temporary(functools.partial(lax.scan, body), zeros, xs)
        for body in (apart, in_place)
    )
    assert more - less > stack - 2 * layer


@pytest.mark.parametrize("depth", [1, 2])
def test_one_layer_runs_without_a_loop(depth):
    """Compilers for TPUs run parts of a loop of one round twice, collectives too."""
    weights, x, context = arguments()
    rows = Rows(DEPTH - depth, jnp.arange(DEPTH - depth, DEPTH))
    layers = scan("full", context)

    def passes(weights, x):
        y, residuals = layers.forward(weights, {}, x, rows)
        return y, layers.backward(weights, {}, residuals, y, rows)

    text = str(jax.make_jaxpr(passes)(weights, x))
    assert ("scan[" in text) == (depth > 1)

    def plain(stack, x):
        for i, w in enumerate(stack):
            x = layer({"w": w}, x, i, context)
        return x

    y, (dx, gradient) = passes(weights, x)
    want, vjp = jax.vjp(plain, weights["w"][DEPTH - depth :], x)
    want = want, *vjp(want)
    found = jax.tree.leaves((y, gradient["w"], dx))
    for got, of_loop in zip(found, jax.tree.leaves(want), strict=True):
        most = 1e-5 * np.abs(of_loop).max()
        np.testing.assert_allclose(got, of_loop, rtol=0, atol=most)
