"""Arrays and trees of arrays: types and small functions that every room uses.

Shape letters, for the whole repository: B batch, L length, C length of one loss block,
D embed, F mlp, N heads, K kv_heads, H head_dim, V vocab, M microbatches; in mixtures of
experts T tokens, E experts, X experts of a token, S slots of experts. A suffix such as
``x_BLD`` gives the logical dims of an array, also if the value is one shard of it.
"""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array
Params = dict[str, Array]
"""Parameters by path, such as {"blocks/attention/q": array}."""


def num_bytes(x: Any) -> int:
    """Bytes of one array, or of anything with a shape and a dtype."""
    dtype = x.dtype if is_key(x) else jnp.dtype(x.dtype)
    return math.prod(x.shape) * dtype.itemsize


def is_key(x: Any) -> bool:
    """Whether an array holds random keys (`jax.random.key`)."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def dtype_name(x: Any) -> str:
    """Name of the dtype, such as "float32"; "key<fry>" for random keys."""
    return str(x.dtype) if is_key(x) else jnp.dtype(x.dtype).name


def abstract(params: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """{path: ShapeDtypeStruct} of {path: anything with a shape and a dtype}."""
    return {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in params.items()}


def abstract_layer(stack: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """{path: ShapeDtypeStruct} of one layer of a stack {path: [depth, ...]}."""
    return {
        path: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for path, x in stack.items()
    }


def vary(x: Array, axes: tuple[str, ...]) -> Array:
    """Marks an array as varying over manual axes, so that a vjp adds no psum for it."""
    missing = frozenset(axes) - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def vary_alike(*arrays: Array) -> tuple[Array, ...]:
    """Marks arrays as varying over the union of their manual axes.

    A function with a vjp of its own then leaves sums over these axes to this mark.
    """
    types = (jax.typeof(x).manual_axis_type.varying for x in arrays)
    axes = tuple(sorted(frozenset().union(*types)))
    return tuple(vary(x, axes) for x in arrays)


def other_leaf(tree: Any, like: Any) -> tuple[str, str, str] | None:
    """The first leaf that has another shape or dtype than that of another tree.

    Args:
      tree: pytree of arrays.
      like: pytree of arrays or ShapeDtypeStructs.

    Returns:
      (its path, what it is, what it is in `like`), "missing" where a tree lacks it;
      None if there is no such leaf.
    """
    given, wanted = leaves_by_path(tree), leaves_by_path(like)
    for path in {**wanted, **given}:
        kinds = [
            "missing" if x is None else f"{jnp.result_type(x)}{list(x.shape)}"
            for x in (given.get(path), wanted.get(path))
        ]
        if kinds[0] != kinds[1]:
            return path, *kinds
    return None


def to_host(tree: Any) -> Any:
    """Arrays moved to host memory, each shard to its device's host; under jit alone."""
    return jax.device_put(tree, jax.memory.Space.Host)


def to_device(tree: Any) -> Any:
    """Arrays moved to the devices' memory from host memory; under jit alone."""
    return jax.device_put(tree, jax.memory.Space.Device)


def row_key(stack: str, path: str) -> str:
    """Key of a leaf of the optimizer state that one layer of a stack alone has.

    Args:
      stack: path of the stack.
      path: the model's own path of the layer's parameter.
    """
    return f"{stack}@{path}"


def stack_of_row(key: Any) -> str:
    """Path of the stack whose one layer a key of `row_key` names; "" for others."""
    stack, found, _ = str(key).partition("@")
    return stack if found else ""


def parameter_path(keys: Iterable[Any], params: Any) -> str | None:
    """Path of the parameter that a leaf of the optimizer state belongs to, or None.

    It is the innermost dict key that is a path: outer ones may be labels.

    Args:
      keys: key path of the leaf (`jax.tree_util.tree_flatten_with_path`).
      params: paths of the parameters; a dict with the paths as keys will do.
    """
    paths = [key.key for key in keys if isinstance(key, jax.tree_util.DictKey)]
    return next((path for path in reversed(paths) if path in params), None)


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """{path: leaf} of a tree, with paths as `jax.tree_util.keystr` writes them."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(keys): leaf for keys, leaf in leaves}


def is_number(x: Array) -> bool:
    """Whether an array holds numbers; random keys and float0 are none."""
    return jnp.issubdtype(x.dtype, jnp.number)


def rounded(x: Array, dtype: Any) -> Array:
    """The numbers of a narrower dtype, in the dtype of x.

    Around a loop that casts slices of a stack, the TPU compiler casts the whole stack
    once and holds the copy, barriers or not. It does not move this rounding.
    """
    if x.dtype == dtype or not jnp.issubdtype(dtype, jnp.floating):
        return x
    kind = jnp.finfo(dtype)
    if jnp.finfo(x.dtype).nexp != kind.nexp:
        return x  # Float16: the rounding would flush its smallest numbers to zero.
    return lax.reduce_precision(x, kind.nexp, kind.nmant)
