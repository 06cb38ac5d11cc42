"""The call of a layer as activations: its arguments as floating-point arrays.

A model that is cut at its layers (`layer_cut`) hands a `LayerCall` from layer to layer.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.arrays import Array


class _Static(NamedTuple):
    """An argument that is no array, such as a flag."""

    value: Any


class _Converted(NamedTuple):
    """An array that is no activation: its dtype."""

    dtype: Any


@dataclasses.dataclass(frozen=True)
class _Structure:
    """The arguments of a call without their arrays.

    Attributes:
      tree: structure of (args, kwargs).
      num_x: number of leaves of the first argument.
      others: a `_Static` or a `_Converted` for every other leaf.
    """

    tree: Any
    num_x: int
    others: tuple[_Static | _Converted, ...]


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class LayerCall:
    """The arrays that a layer is called with, and the structure of the call.

    Attributes:
      x: leaves of the first argument, which the layer returns with new values.
      others: arrays among the other arguments, such as masks and positions. Integers
        are held as floats, which pipelines can send and scans can differentiate.
      structure: how the layer is called.
    """

    x: tuple[Array, ...]
    others: tuple[Array, ...]
    structure: _Structure

    @classmethod
    def of(cls, layer: str, args: tuple, kwargs: dict[str, Any]) -> "LayerCall":
        """The call layer(*args, **kwargs).

        Raises:
          ValueError: no positional argument, or a first argument that holds anything
            but floating-point arrays.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        num_x = len(jax.tree.leaves(args[:1]))
        x, others = tuple(leaves[:num_x]), leaves[num_x:]
        if not x or not all(map(_is_activation, x)):
            found = ", ".join(map(_describe, x)) or "nothing"
            raise ValueError(
                f"{layer} is called with {found} as its first positional argument: "
                "layers that meshpar runs one by one take floating-point activations "
                "there"
            )
        kinds = tuple(
            _Converted(jnp.asarray(leaf).dtype) if _is_array(leaf) else _Static(leaf)
            for leaf in others
        )
        arrays = tuple(_to_float(leaf) for leaf in others if _is_array(leaf))
        return cls(x, arrays, _Structure(tree, num_x, kinds))

    def arguments(self) -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs) of the call."""
        arrays = iter(self.others)
        others = [
            kind.value
            if isinstance(kind, _Static)
            else _from_float(next(arrays), kind.dtype)
            for kind in self.structure.others
        ]
        return jax.tree.unflatten(self.structure.tree, [*self.x, *others])

    def followed_by(self, layer: str, output: Any) -> "LayerCall":
        """The call of the next layer with the output of this one.

        Raises:
          ValueError: the output's arrays do not have the shapes and dtypes of x.
        """
        leaves = tuple(jax.tree.leaves(output))
        before, after = (
            [(x.shape, x.dtype) for x in arrays] for arrays in (self.x, leaves)
        )
        if before != after:
            raise ValueError(
                f"{layer} turns {', '.join(map(_describe, self.x))} into "
                f"{', '.join(map(_describe, leaves))}: layers that meshpar runs one by "
                "one return activations of the shapes and dtypes that they take"
            )
        return dataclasses.replace(self, x=leaves)

    def tree_flatten(self) -> tuple[tuple, _Structure]:
        """The arrays as children, the structure as static data."""
        return (self.x, self.others), self.structure

    @classmethod
    def tree_unflatten(cls, structure: _Structure, arrays: tuple) -> "LayerCall":
        """The inverse of `tree_flatten`."""
        return cls(*arrays, structure)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _is_activation(leaf: Any) -> bool:
    return _is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else repr(leaf)


def _to_float(x: Any) -> Array:
    """Integers as two halves of 16 bits, [2, ...], which float32 holds exactly."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x
    if x.dtype == jnp.bool_:
        return x.astype(jnp.float32)
    return jnp.stack([x >> 16, x & 0xFFFF]).astype(jnp.float32)


def _from_float(x: Array, dtype: Any) -> Array:
    if jnp.issubdtype(dtype, jnp.floating):
        return x
    if dtype == jnp.bool_:
        return x.astype(dtype)
    high, low = jax.lax.stop_gradient(x).astype(jnp.int32)
    return (high.astype(dtype) << 16) | low.astype(dtype)
