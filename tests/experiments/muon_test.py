"""Muon of recipes: against singular values, optax's iteration, and a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers, scale_by_muon
from support.marks import slow

from experiments import recipes
from experiments.recipes import muon
from experiments.recipes.optimizers import make_optimizer
from meshpar.runs.config import with_settings

SHAPES = [(8, 24), (24, 8), (16, 16)]
ROUNDING = 0.1
"""Error of five iterations in bfloat16, of the norm; that of other matrices is 1."""


def error(found, expected):
    found, expected = (np.asarray(x, np.float32) for x in (found, expected))
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_1_and_singular_vectors_stay(shape):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    u, _, v = np.linalg.svd(x, full_matrices=False)
    y = np.asarray(muon.orthogonal(jnp.asarray(x)), np.float32)
    turned = u.T @ y @ v.T
    values = np.diag(turned)
    assert 0.5 < values.min() and values.max() < 1.4
    # Rounding to bfloat16 alone turns them.
    assert np.abs(turned - np.diag(values)).max() < 0.05


@pytest.mark.parametrize("shape", SHAPES)
def test_the_iteration_is_that_of_optax(shape):
    x = jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)
    dims = {"w": MuonDimensionNumbers()}
    plain = scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=dims)
    expected, _ = plain.update({"w": x}, plain.init({"w": x}))
    assert error(muon.orthogonal(x, jnp.float32), expected["w"]) < 1e-4
    assert error(muon.orthogonal(x), expected["w"]) < ROUNDING


@pytest.mark.parametrize(
    "names, matrix",
    [
        (("layers", "embed", "heads", "head_dim"), (1, 1)),
        (("layers", "heads", "head_dim", "embed"), (1, 2)),
        (("embed", "mlp"), (0, 1)),
        (("layers", "expert", "mlp", "embed"), (2, 1)),
        (("layers", "expert", "embed", "mlp"), (2, 1)),
        (("layers", "embed"), None),
        (("layers", "heads", "head_dim"), None),
        (("layers", "embed", None), None),
        (("vocab", "embed"), None),
        (("embed", "vocab"), None),
        (("length", "embed"), None),
        (None, None),
    ],
)
def test_matrices_of_layers_are_known_by_the_names_of_their_dims(names, matrix):
    assert muon.matrix_of(names) == matrix


@pytest.mark.parametrize("recipe", [slow("bytes-llama"), "bytes-moe"])
def test_an_update_has_the_size_of_adamws_and_the_matrices_of_the_model(recipe):
    """Against optax's own Muon of stacks of two layers, with dims by hand."""
    settings = ["optimizer.name=muon", "model.depth=2", "model.vocab=256"]
    config = with_settings(recipes.get(recipe), settings)
    model = config.make_model()
    ours = make_optimizer(config.optimizer, 10, model)
    rng = np.random.default_rng(0)
    e = 2 if recipe == "bytes-moe" else 1
    attention = {"q": (2, 128, 4, 32), "k": (2, 128, 2, 32), "o": (2, 4, 32, 128)}
    experts, width = ((8,), 192) if e == 2 else ((), 384)
    mlp = {"up": (2, *experts, 128, width), "down": (2, *experts, width, 128)}
    blocks = {"attention": attention, "mlp": mlp}
    own = {"embedding": (256, 128), "blocks": blocks}
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    params, grads = (jax.tree.map(draw, own, is_leaf=is_shape) for _ in range(2))
    changes, _ = jax.jit(ours.update)(grads, ours.init(params), params)
    rate = config.optimizer.learning_rate / (config.optimizer.warmup_steps + 1)
    dims = {
        "q": MuonDimensionNumbers(1, (2, 3)),
        "k": MuonDimensionNumbers(1, (2, 3)),
        "o": MuonDimensionNumbers((1, 2), 3),
        "up": MuonDimensionNumbers(e, e + 1),
        "down": MuonDimensionNumbers(e, e + 1),
    }
    weights = {"blocks": params["blocks"]}
    by_name = jax.tree_util.tree_map_with_path(lambda k, _: dims[k[-1].key], weights)
    plain = optax.chain(
        scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=by_name)
    )
    # Of the first step: Nesterov's mean is a multiple, which makes no difference.
    gradients = {"blocks": grads["blocks"]}
    turned, _ = jax.jit(plain.update)(gradients, plain.init(weights))
    for keys, expected in jax.tree_util.tree_flatten_with_path(turned)[0]:
        name = keys[-1].key
        x, got = weights, changes
        for key in keys:
            x, got = x[key.key], got[key.key]
        sizes = {"q": 128, "k": 128, "o": 128, "up": width, "down": width}
        decayed = config.optimizer.weight_decay * x
        expected = -rate * (0.2 * np.sqrt(sizes[name]) * expected + decayed)
        assert error(got, expected) < ROUNDING
    adam = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1)
    weight = {"w": params["embedding"]}
    step, _ = adam.update({"w": grads["embedding"]}, adam.init(weight), weight)
    np.testing.assert_allclose(changes["embedding"], step["w"], rtol=1e-5, atol=1e-7)
