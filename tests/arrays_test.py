"""The small functions over arrays that every room uses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar import arrays


def test_bytes_of_arrays_and_of_shapes():
    assert arrays.num_bytes(np.zeros((2, 3), np.float32)) == 24
    assert arrays.num_bytes(jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)) == 12
    assert arrays.num_bytes(jnp.int8(0)) == 1


def test_abstract_arrays_and_layers():
    stack = {"w": jnp.zeros((5, 2, 3)), "b": jnp.zeros(5, jnp.int32)}
    assert arrays.abstract(stack) == {
        "w": jax.ShapeDtypeStruct((5, 2, 3), jnp.float32),
        "b": jax.ShapeDtypeStruct((5,), jnp.int32),
    }
    assert arrays.abstract_layer(stack) == {
        "w": jax.ShapeDtypeStruct((2, 3), jnp.float32),
        "b": jax.ShapeDtypeStruct((), jnp.int32),
    }


def test_optimizer_leaves_know_their_parameter():
    params = {"a/w": jnp.ones(2), "b": jnp.ones(3)}
    state = optax.inject_hyperparams(optax.adam)(1e-3).init(params)
    hyperparams = state.hyperparams
    leaves = jax.tree_util.tree_leaves_with_path(state)
    paths = [arrays.parameter_path(keys, params) for keys, _ in leaves]
    assert "learning_rate" in hyperparams and set(paths) == {None, "a/w", "b"}
    moments = jax.tree_util.tree_leaves_with_path(state.inner_state)
    paths = [arrays.parameter_path(keys, params) for keys, _ in moments]
    assert paths == [None, "a/w", "b", "a/w", "b"]


def test_a_label_with_the_name_of_a_parameter_is_no_parameter():
    keys = [jax.tree_util.DictKey("b"), jax.tree_util.DictKey("a/w")]
    assert arrays.parameter_path(keys, {"a/w", "b"}) == "a/w"


def test_random_keys_have_bytes_and_a_name():
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
    assert arrays.num_bytes(key) == 3 * 8
    assert arrays.dtype_name(key) == "key<fry>"
    assert arrays.dtype_name(jnp.ones(2, jnp.bfloat16)) == "bfloat16"
