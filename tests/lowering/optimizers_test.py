"""Optimizers see the model's own tree, and train as a plain loop of jax and optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from optax import contrib
from support.biased_model import (
    lower,
    make_model,
    nest,
    rows,
    train,
    train_plainly,
)
from support.marks import slow
from support.tiny_models import host, model, relative_error

import meshpar
from meshpar.arrays import abstract, leaves_by_path, parameter_path
from meshpar.errors import MeshparError
from meshpar.lowering.layer_rows import LayerRows
from meshpar.lowering.matrix_owners import FROM_OWNERS, TO_OWNERS
from meshpar.lowering.nesting import NestedState, Nesting
from meshpar.lowering.optimizer import make_optimizer

STEPS = 3
MODEL = make_model()
PARAMS = abstract(MODEL.params)
KEYS = {path: MODEL.keys_of(path) for path in PARAMS}


def test_keys_are_those_of_the_model():
    assert KEYS["ends/1/bias"] == ("ends", 1, "bias")  # Of a list: an int.
    assert Nesting(KEYS).nest(PARAMS) == nest(PARAMS)
    linen = model("linen")
    for path in linen.params:
        assert linen.keys_of(path) == tuple(path.split("/"))


def no_bias(params):
    return traverse_util.path_aware_map(lambda path, _: path[-1] != "bias", params)


def ends_apart(params):
    return traverse_util.path_aware_map(
        lambda path, _: "end" if path[:2] == ("ends", 0) else "rest", params
    )


MASKED = optax.adamw(1e-2, weight_decay=1.0, mask=no_bias)
LABELLED = optax.multi_transform(
    {
        "end": optax.sgd(1e-2, momentum=0.9),
        "rest": optax.inject_hyperparams(optax.adam)(
            optax.linear_schedule(0.1, 0.01, STEPS)
        ),
    },
    ends_apart,
)


PLATEAU = optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau(patience=0))


def error_to_plain_loop(program, transformation):
    """Of the weights after some steps, against optax on the nested tree."""
    start = program.in_model_order(program.init(0)).params
    state = program.in_model_order(train(program, STEPS))
    plain = train_plainly(transformation, start, STEPS)[-1]
    return relative_error(host(state.params), plain)


@pytest.mark.parametrize("lowering", ["shard_map", slow("jit")])
@pytest.mark.parametrize("name", [slow("masked"), "labelled"])
def test_masks_and_labels_by_path_mean_the_paths_of_the_model(name, lowering):
    transformation = {"masked": MASKED, "labelled": LABELLED}[name]
    program = lower("fsdp=8", transformation, lowering=lowering)
    assert error_to_plain_loop(program, transformation) < 1e-6


def test_a_mask_by_path_matters():
    """Weight decay of 1% a step would show above the tolerance of these tests."""
    everywhere = optax.adamw(1e-2, weight_decay=1.0)
    start = MODEL.init(jax.random.key(0))
    masked, plain = (
        train_plainly(transformation, start, 1)[-1]
        for transformation in (MASKED, everywhere)
    )
    assert relative_error(masked, plain) > 1e-3


@pytest.mark.parametrize(
    "name, transformation",
    [
        slow("plateau", PLATEAU),
        slow("lamb", optax.lamb(1e-2, mask=no_bias)),
        ("muon", contrib.muon(1e-2)),
        slow("polyak", optax.polyak_sgd(max_learning_rate=0.1)),
        slow("sm3", optax.sm3(0.1)),
        slow("adaptive", optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1))),
    ],
)
def test_what_is_not_elementwise_equals_one_device_and_declares_its_traffic(
    name, transformation
):
    program = lower("fsdp=4,tensor=2", transformation)
    assert error_to_plain_loop(program, transformation) < 1e-6
    assert program.violations() == []
    whys = {term.why for term in program.contract.terms if term.bound}
    if name != "plateau":
        assert "global norm, and the optimizer's reductions over tensors" in whys
    owners = {TO_OWNERS, FROM_OWNERS} & {term.why for term in program.contract.terms}
    assert bool(owners) == (name == "muon")


def test_an_elementwise_optimizer_declares_nothing_beyond_the_global_norm():
    terms = lower("fsdp=8", MASKED).contract.terms
    assert {term.why for term in terms if term.bound} == {"global norm"}


# The nested tree and the flat one.

STATES = {
    "adamw": MASKED,
    "labels": LABELLED,
    "prefix labels": optax.multi_transform(
        {"a": optax.adam(1e-2), "b": optax.set_to_zero()},
        {"layers": "a", "ends": {0: "b", 1: "a"}},
    ),
    "labels with the names of the model": optax.multi_transform(
        {"layers": optax.adam(1e-2), "ends": optax.sgd(1e-2, 0.9)},
        {"layers": "layers", "ends": "ends"},
    ),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2),
    "prefix mask": optax.masked(optax.adam(1e-2), {"layers": True, "ends": False}),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "sm3, a list per parameter": optax.sm3(1e-2),
    "lbfgs": optax.lbfgs(linesearch=None),
    "average": meshpar.with_ema(optax.apply_if_finite(optax.lion(1e-3), 2), 0.9),
}


@pytest.mark.parametrize("name", STATES)
def test_flat_and_nested_states_are_exact_inverses(name):
    transformation = STATES[name]
    if isinstance(transformation, optax.MultiSteps):
        transformation = transformation.gradient_transformation()
    state = jax.eval_shape(transformation.init, nest(PARAMS))
    structure = jax.tree.structure(state)
    state = jax.tree.unflatten(structure, range(structure.num_leaves))
    forms = NestedState.of(state, Nesting(KEYS), LayerRows({}))
    flat = forms.store(state)
    assert forms.nest(flat) == state
    assert forms.store(forms.nest(flat)) == flat
    # Leaves that belong to a parameter stand below its path, the others do not.
    leaves = jax.tree_util.tree_leaves_with_path(flat)
    nested_names = {
        number: jax.tree_util.keystr(keys)
        for keys, number in jax.tree_util.tree_leaves_with_path(state)
    }
    for keys, number in leaves:
        path = parameter_path(keys, PARAMS)
        name = nested_names[number]
        own = [
            path
            for path, keys in KEYS.items()
            if "".join(f"[{key!r}]" for key in keys) in name
        ]
        assert [path] == (own or [None]), name


@pytest.mark.parametrize(
    "transformation",
    [
        optax.adam(1e-2),
        optax.adamw(1e-2),
        optax.sgd(1e-2, momentum=0.9),
        optax.adafactor(1e-2, min_dim_size_to_factor=4),
    ],
)
def test_states_keep_the_names_that_checkpoints_know(transformation):
    """The leaves of a state that was made from {path: array}."""
    state = make_optimizer(transformation, PARAMS, KEYS).abstract_state
    flat = jax.eval_shape(transformation.init, PARAMS)
    assert leaves_by_path(state) == leaves_by_path(flat)
    assert jax.tree.structure(state) == jax.tree.structure(flat)


def test_a_mask_of_the_flat_dict_still_works():
    flat_mask = {path: not path.endswith("bias") for path in PARAMS}
    by_flat_mask = optax.adamw(1e-2, weight_decay=1.0, mask=flat_mask)
    params = MODEL.init(jax.random.key(0))
    grads = jax.tree.map(jnp.ones_like, params)
    updates = []
    for transformation in (MASKED, by_flat_mask):
        optimizer = make_optimizer(transformation, PARAMS, KEYS)
        state = optimizer.init(params)
        updates.append(optimizer.update(grads, state, params, jnp.float32(1))[0])
    for path, update in updates[0].items():
        np.testing.assert_array_equal(updates[1][path], update, err_msg=path)


@pytest.mark.parametrize(
    "layout, options",
    [
        slow("replica=2,fsdp=2", {"mode": meshpar.LocalSGD(period=1)}),
        ("pipe=3,microbatches=1,schedule=pipedream", {}),
    ],
)
def test_conditionals_of_optimizers_run_where_devices_differ(layout, options):
    """Two replicas on equal rows, and one minibatch, are plain training."""
    transformation = optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2)
    program = lower(layout, transformation, **options)
    state, data = program.init(0), rows()
    start = host(program.weights(state))
    halves = jax.tree.map(lambda x: np.concatenate([x[:8], x[:8]]), data)
    for _ in range(STEPS):
        state, _ = program.step(state, halves)
    plain = train_plainly(transformation, start, STEPS, batch=halves)[-1]
    assert relative_error(host(program.weights(state)), plain) < 1e-6
    assert program.violations() == []


def test_replicas_use_losses_of_their_own():
    transformation = optax.MultiSteps(optax.chain(contrib.muon(1e-2), PLATEAU), 1)
    mode = meshpar.LocalSGD(period=2)
    state = train(lower("replica=2,fsdp=2", transformation, mode=mode), 1)
    first, second = state.optimizer_state.inner_opt_state[1][1].best_value
    assert np.isfinite([first, second]).all() and abs(first - second) > 1e-3


# Refused before anything is compiled.


def test_an_optimizer_that_fits_no_tree_keeps_its_error():
    mask = {"layers": True, "end": False}
    with pytest.raises(ValueError, match="ends"):
        lower("fsdp=8", optax.adamw(1e-2, mask=mask))


def widening():
    def init(params):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    def update(grads, state, params=None):
        return grads, jax.tree.map(lambda s, g: s + g, state, grads)

    return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    "transformation, words",
    [
        (optax.lookahead(optax.sgd(0.1), 5, 0.5), "lookahead trains pairs.*with_ema"),
        (optax.lbfgs(), "needs value_fn, and training gives.*linesearch=None"),
        (
            optax.MultiSteps(PLATEAU, 2).gradient_transformation(),
            "needs value, and .* drops these two.*MultiSteps itself",
        ),
        (widening(), r"'bias'\] is bfloat16\[8\] before .* float32\[8\] after"),
    ],
)
def test_what_training_cannot_run_is_refused(transformation, words):
    with pytest.raises(MeshparError, match=words):
        lower("fsdp=8", transformation)
