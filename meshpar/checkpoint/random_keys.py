"""Random keys in checkpoints: stored as the integers that they consist of."""

from typing import Any

import jax

from meshpar.arrays import is_key


def without_keys(tree: Any) -> Any:
    """The tree with typed random keys as uint32 [..., words].

    Args:
      tree: arrays, or ShapeDtypeStructs with shardings.
    """

    def convert(leaf: Any) -> Any:
        if not is_key(leaf):
            return leaf
        if isinstance(leaf, jax.Array):
            return jax.random.key_data(leaf)
        data = jax.eval_shape(jax.random.key_data, leaf)
        return data.update(sharding=leaf.sharding)

    return jax.tree.map(convert, tree)


def with_keys(tree: Any, like: Any) -> Any:
    """The inverse of `without_keys`.

    Args:
      tree: arrays.
      like: the tree with keys, as ShapeDtypeStructs.
    """

    def convert(leaf: Any, data: jax.Array) -> jax.Array:
        if not is_key(leaf):
            return data
        return jax.random.wrap_key_data(data, impl=_implementation(leaf))

    return jax.tree.map(convert, like, tree)


def _implementation(leaf: jax.ShapeDtypeStruct) -> Any:
    """The random number generator of abstract keys; jax names only that of arrays."""
    found = []

    def look(keys: jax.Array) -> jax.Array:
        found.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    jax.eval_shape(look, leaf)
    return found[0]
