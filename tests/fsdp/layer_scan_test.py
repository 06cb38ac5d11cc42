"""What the scan over layers saves for its backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar.fsdp.differentiable_scan import differentiable
from meshpar.fsdp.layer_scan import LayerScan, Rows
from meshpar.layouts.remat import wrap_remat

DEPTH, ROWS, EMBED, SEEN = 3, 4, 8, 5


def layer(weights, x, number, context):
    """Mixes what it passes on into its activations, where the context says so."""
    del number
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
        return differentiable(scan(remat, context))(weights, {}, x)[0].sum()

    got, want = (
        jax.jit(jax.grad(fn, argnums=(0, 1)))(*arguments()) for fn in (scanned, plain)
    )
    for own, expected in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        error = np.linalg.norm(own - expected) / np.linalg.norm(expected)
        assert error < 1e-5
