"""Parameters of a user's own, as a nested or a flat tree, put onto their devices."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar.arrays import Params
from meshpar.errors import MeshparError, nearest
from meshpar.models.model import Model

_LIMIT = 5
"""Paths that an error names."""


def flat_params(tree: Any) -> dict[str, Any]:
    """{path: leaf} of a tree of parameters.

    Args:
      tree: {path: array}, nested dicts, the variables of a Linen module, an NNX module
        or its state, in which random streams are left out.
    """
    tree = nnx.state(tree) if isinstance(tree, nnx.Module) else nn.meta.unbox(tree)
    if isinstance(tree, Mapping) and isinstance(tree.get("params"), Mapping):
        others = {name: x for name, x in tree.items() if name != "params"}
        tree = {**tree["params"], **others}
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_variable)[0]
    leaves = [(k, x) for k, x in leaves if not isinstance(x, nnx.RngState)]
    paths = paths_of([keys for keys, _ in leaves])
    values = (x.get_value() if is_variable(x) else x for _, x in leaves)
    return dict(zip(paths, values, strict=True))


def updated(tree: Any, weights: Mapping[str, Any]) -> Any:
    """A user's model with other weights.

    Args:
      tree: an NNX module, which is changed in place, or nested dicts of arrays.
      weights: {path: array}, as in `flat_params`; others stay as they are.

    Raises:
      MeshparError: the tree lacks one of them, or it has another shape.
    """
    known = flat_params(tree)
    for path, x in weights.items():
        if path not in known:
            raise MeshparError(
                f"the module has no variable {path} ({nearest(path, known)}); give the "
                "one that the model was made of"
            )
        if (shape := jnp.shape(known[path])) != jnp.shape(x):
            raise MeshparError(
                f"{path} is {list(shape)} in the module and {list(jnp.shape(x))} in "
                "the model"
            )
    new = {path: jnp.asarray(x, known[path].dtype) for path, x in weights.items()}
    if isinstance(tree, nnx.Module):
        leaves = [
            (keys, leaf.replace(new[path]) if is_variable(leaf) else new[path])
            for keys, leaf in nnx.to_flat_state(nnx.state(tree))
            if (path := "/".join(map(str, keys))) in new
        ]
        nnx.update(tree, nnx.from_flat_state(leaves))
        return tree
    is_nested = isinstance(tree, Mapping) and isinstance(tree.get("params"), Mapping)

    def value(keys: tuple, leaf: Any) -> Any:
        names = [str(getattr(key, "key", key)) for key in keys]
        path = "/".join(names[1:] if is_nested and names[0] == "params" else names)
        return new.get(path, leaf)

    return nn.meta.replace_boxed(
        tree, jax.tree_util.tree_map_with_path(value, nn.meta.unbox(tree))
    )


def is_variable(node: Any) -> bool:
    """Whether a node of a tree is an NNX variable."""
    return isinstance(node, nnx.Variable)


def paths_of(keys: Sequence[tuple]) -> list[str]:
    """The paths of leaves from their keys in a nested tree.

    Where orbax saves the state of an NNX module, each variable is a dict {"value": x}.
    """
    parts = [
        [getattr(k, "key", getattr(k, "name", getattr(k, "idx", None))) for k in path]
        for path in keys
    ]
    if all(len(path) > 1 and path[-1] == "value" for path in parts):
        parts = [path[:-1] for path in parts]
    return ["/".join(map(str, path)) for path in parts]


def stacked_params(
    model: Model, shapes: Mapping[str, Any], given: Any
) -> dict[str, Any]:
    """{path: array} of a model from parameters of its module, layers stacked.

    Variables that are no parameters may be left out.

    Args:
      model: the model.
      shapes: {path: anything with a shape}, in the order of the model.
      given: as in `flat_params`, with the module's own paths or with the model's.

    Raises:
      MeshparError: a parameter is missing, unknown, of another shape or of another kind
        of numbers.
    """
    flat = flat_params(given)
    if set(flat) - set(model.params):
        try:
            flat = model.stack_variables(flat)
        except (KeyError, IndexError, ValueError) as error:
            raise MeshparError(
                f"the layers of the given parameters do not stack ({error!r}); give "
                "every parameter of every layer, with the paths of the module"
            ) from error
    known = model.params
    if unknown := sorted(set(flat) - set(known)):
        raise MeshparError(
            f"{_listed(unknown)}: no parameters of the model "
            f"({nearest(unknown[0], known)})"
        )
    wanted = {path for path, param in known.items() if not param.is_state}
    if missing := sorted(wanted - set(flat)):
        raise MeshparError(
            f"the given parameters lack {_listed(missing)}; give every parameter "
            f"({nearest(missing[0], flat)})"
        )
    for path, x in flat.items():
        if tuple(np.shape(x)) != shapes[path].shape:
            raise MeshparError(
                f"{path} is given as {list(np.shape(x))}, but the model has "
                f"{list(shapes[path].shape)}"
            )
        check_numbers(path, jnp.result_type(x), known[path].dtype)
    return flat


def check_numbers(path: str, given: Any, wanted: Any) -> None:
    """Lets floating-point numbers change their width, and nothing else."""
    if given != wanted and not all(
        jnp.issubdtype(dtype, jnp.floating) for dtype in (given, wanted)
    ):
        raise MeshparError(
            f"{path} is given as {given}, but the model has {jnp.dtype(wanted).name}; "
            f"convert it yourself, as in x.astype({jnp.dtype(wanted).name!r})"
        )


def _listed(paths: list[str]) -> str:
    more = len(paths) - _LIMIT
    return ", ".join(paths[:_LIMIT]) + (f" and {more} more" if more > 0 else "")


def place_params(
    given: Mapping[str, Any], shardings: Mapping[str, jax.ShapeDtypeStruct]
) -> Params:
    """Puts each array onto its shards; host arrays never lie whole on a device.

    Args:
      given: {path: array}, of numpy or jax; or anything with a dtype that gives the
        parts at an index, of which only those of the shards are read.
      shardings: {path: ShapeDtypeStruct with sharding}.
    """
    return {path: place(x, shardings[path]) for path, x in given.items()}


def place(x: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Puts an array onto its shards; one of jax may share memory with the result.

    Args:
      x: of numpy or jax; or anything with a dtype that gives the parts at an index.
      like: ShapeDtypeStruct with sharding.
    """
    if isinstance(x, jax.Array):
        return jax.device_put(x.astype(like.dtype), like.sharding)
    x = x if hasattr(x, "dtype") else np.asarray(x)
    return jax.make_array_from_callback(
        like.shape, like.sharding, _shard_of(x, like.dtype)
    )


def _shard_of(x: np.ndarray, dtype: Any) -> Callable[[Any], np.ndarray]:
    return lambda index: x[index].astype(dtype)
