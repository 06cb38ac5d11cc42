"""The reach of optax's optimizers, read from one traced update."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import traverse_util
from optax import contrib

from meshpar.lowering.optimizer import make_optimizer

SHAPES = {"layers/w": (3, 8, 16), "layers/bias": (3, 8), "head": (8, 32)}
PARAMS = {p: jax.ShapeDtypeStruct(shape, jnp.float32) for p, shape in SHAPES.items()}
KEYS = {path: tuple(path.split("/")) for path in PARAMS}


def without_bias(params):
    return traverse_util.path_aware_map(lambda path, _: path[-1] != "bias", params)


def reach(transformation, params=PARAMS):
    return make_optimizer(transformation, params, KEYS).reach


ADAM = optax.adam(0.1)
ELEMENTWISE = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, 0.9, nesterov=True),
    "adam": ADAM,
    "adamw with a mask": optax.adamw(0.1, mask=without_bias),
    "lion": optax.lion(0.1),
    "rmsprop": optax.rmsprop(0.1, centered=True),
    "clip": optax.chain(optax.clip(1.0), ADAM),
    "zero_nans": optax.chain(optax.zero_nans(), ADAM),
    "MultiSteps": optax.MultiSteps(ADAM, 4),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(0.1, 0.0, 10)
    ),
    "schedule_free": contrib.schedule_free_adamw(0.1),
    "reduce_on_plateau": optax.chain(ADAM, contrib.reduce_on_plateau()),
}
TENSOR_WIDE = {
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4),
    "lamb": optax.lamb(0.1),
    "lars": optax.lars(0.1),
    "sm3": optax.sm3(0.1),
    "adaptive_grad_clip": optax.chain(optax.adaptive_grad_clip(0.01), ADAM),
    "clip_by_block_rms": optax.chain(optax.clip_by_block_rms(1.0), ADAM),
    "novograd": optax.novograd(0.1),
}
TREE_WIDE = {
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1.0), ADAM),
    "clipping inside MultiSteps": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), ADAM), 4
    ),
    "apply_if_finite": optax.apply_if_finite(ADAM, 3),
    "polyak_sgd": optax.polyak_sgd(),
    "lbfgs": optax.lbfgs(linesearch=None),
    "prodigy": contrib.prodigy(),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers(name):
    found = reach(ELEMENTWISE[name])
    assert found.elementwise and not found.positional and not found.moves
    # zero_nans counts NaNs tensor by tensor, and updates do not depend on the counts.
    assert found.reduced_bytes == (4 * len(PARAMS) if name == "zero_nans" else 0)


@pytest.mark.parametrize("name", TENSOR_WIDE)
def test_tensor_wide_optimizers(name):
    found = reach(TENSOR_WIDE[name])
    assert found.mixed == set(PARAMS) and not found.crossed
    assert found.reduced_bytes > 0 and not found.moves


@pytest.mark.parametrize("name", TREE_WIDE)
def test_tree_wide_optimizers(name):
    found = reach(TREE_WIDE[name])
    assert found.crossed == set(PARAMS)
    assert found.reduced_bytes > 0 or found.moves


def test_muon_multiplies_matrices_and_trains_the_rest_by_adam():
    found = reach(contrib.muon(0.1))
    assert found.mixed == {"layers/bias", "head"} and not found.crossed
    assert found.moves


def test_a_label_by_path_mixes_its_own_tensors_alone():
    def labels(params):
        return traverse_util.path_aware_map(
            lambda path, _: "norms" if path[0] == "head" else "adam", params
        )

    parts = {"norms": optax.lamb(0.1), "adam": ADAM}
    assert reach(optax.multi_transform(parts, labels)).mixed == {"head"}


def test_bytes_of_reductions_are_those_of_their_results():
    """One mean per tensor; one per column of a matrix, and per column of a layer."""
    means, columns = optax.clip_by_block_rms(1.0), optax.centralize()
    assert reach(means).reduced_bytes == 4 * len(PARAMS)
    assert reach(columns).reduced_bytes == 4 * (3 + 3 + 8)


@pytest.mark.parametrize("name, uses", [("polyak_sgd", True), ("lbfgs", False)])
def test_the_use_of_the_loss_is_seen(name, uses):
    assert reach(TREE_WIDE[name]).uses_loss == uses
    assert reach(ELEMENTWISE["reduce_on_plateau"]).uses_loss


def test_noise_is_positional():
    found = reach(optax.chain(optax.add_noise(0.1, 0.5, key=0), ADAM))
    assert found.elementwise and found.positional


def test_a_transposed_update_is_not_elementwise():
    """Shapes alone do not say that elements stay at their places."""
    flipped = optax.stateless(lambda grads, _: jax.tree.map(jnp.flip, grads))
    assert reach(flipped).mixed == set(PARAMS)


def test_a_dependency_through_the_state_is_seen():
    """The update of a step uses the norms of the steps before."""

    def init(params):
        return jax.tree.map(lambda _: jnp.zeros(()), params)

    def update(grads, state, params=None):
        scaled = jax.tree.map(lambda g, norm: g * norm, grads, state)
        return scaled, jax.tree.map(lambda g: jnp.sum(g * g), grads)

    assert reach(optax.GradientTransformation(init, update)).mixed == set(PARAMS)
