"""The call of a layer as activations, and the rest of its arguments.

A model that is cut at its layers (`layer_cut`) hands a `LayerCall` from layer to layer.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from meshpar.arrays import Array, Params


class Column(NamedTuple):
    """A layer of the first row, as the loss function calls it.

    Attributes:
      configuration: what the layer is beside its arrays; equal for layers that compute
        the same.
      output: structure of what it returns.
    """

    configuration: Any
    output: Any


@dataclasses.dataclass(frozen=True)
class _Structure:
    """The arguments of a call without their arrays.

    Attributes:
      tree: structure of (args, kwargs).
      activations: numbers of the leaves that are activations.
      context: numbers of the leaves that are other arrays.
      flags: all other leaves, such as flags.
      columns: the layers of the first row.
    """

    tree: Any
    activations: tuple[int, ...]
    context: tuple[int, ...]
    flags: tuple[Any, ...]
    columns: tuple[Column, ...]

    def __hash__(self) -> int:
        return hash(self.tree)  # Flags and configurations may have no hash.


class Arguments:
    """The arguments of one call of a layer.

    Attributes:
      leaves: all of them, flat.
      num_x: number of leaves of the first argument.
    """

    def __init__(self, layer: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """Reads the call layer(*args, **kwargs).

        Raises:
          ValueError: no positional argument, or a first argument that holds anything
            but floating-point arrays.
        """
        self.leaves, self._tree = jax.tree.flatten((args, kwargs))
        self.num_x = len(jax.tree.leaves(args[:1]))
        if not self.x or not all(map(is_floating, self.x)):
            found = ", ".join(map(_describe, self.x)) or "nothing"
            raise ValueError(
                f"{layer} is called with {found} as its first positional argument: "
                "layers that meshpar runs one by one take floating-point activations "
                "there"
            )
        if any(map(_is_random_key, self.arrays.values())):
            raise ValueError(
                f"{layer} is called with a random key, with which all layers would "
                "draw the same numbers; give its module random streams of its own"
            )

    @property
    def x(self) -> list[Array]:
        """Leaves of the first argument."""
        return self.leaves[: self.num_x]

    @property
    def arrays(self) -> dict[int, Array]:
        """{number of the leaf: array} of the other arguments."""
        numbered = enumerate(self.leaves)
        return {i: x for i, x in numbered if i >= self.num_x and is_array(x)}

    @property
    def fixed(self) -> tuple[Any, list[Any]]:
        """All that is neither an array nor x."""
        numbered = enumerate(self.leaves[self.num_x :])
        return self._tree, [(i, x) for i, x in numbered if not is_array(x)]

    def call(
        self, is_context: Sequence[int], columns: Sequence[Column]
    ) -> tuple["LayerCall", tuple[Array, ...]]:
        """(the activations, the context) of the call.

        Args:
          is_context: numbers of the leaves that are context.
          columns: the layers of the first row.
        """
        context = tuple(is_context)
        activations = [i for i in self.arrays if i not in context]
        activations = (*range(self.num_x), *activations)
        flags = tuple(
            x for i, x in enumerate(self.leaves) if i >= self.num_x and not is_array(x)
        )
        structure = _Structure(self._tree, activations, context, flags, tuple(columns))
        arrays = tuple(jnp.asarray(self.leaves[i]) for i in activations)
        call = LayerCall(arrays, self.num_x, structure)
        return call, tuple(jnp.asarray(self.leaves[i]) for i in context)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class LayerCall:
    """The activations that a layer is called with.

    Attributes:
      arrays: leaves of the first argument, which the layer returns with new values, and
        other arguments that a gradient passes through.
      num_x: number of leaves of the first argument.
      structure: how the layer is called.
    """

    arrays: tuple[Array, ...]
    num_x: int
    structure: _Structure

    @property
    def x(self) -> tuple[Array, ...]:
        """Leaves of the first argument."""
        return self.arrays[: self.num_x]

    @property
    def kept(self) -> tuple[Array, ...]:
        """Activations that layers do not return."""
        return self.arrays[self.num_x :]

    @property
    def columns(self) -> tuple[Column, ...]:
        """The layers of the first row."""
        return self.structure.columns

    def arguments(self, context: tuple[Array, ...]) -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs) of the call."""
        how = self.structure
        known = dict(zip(how.activations, self.arrays, strict=True))
        known |= dict(zip(how.context, context, strict=True))
        flags, numbers = iter(how.flags), range(how.tree.num_leaves)
        leaves = (known[i] if i in known else next(flags) for i in numbers)
        return jax.tree.unflatten(how.tree, leaves)

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
        return dataclasses.replace(self, arrays=leaves + self.kept)

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """The arrays as children, all else as static data."""
        return self.arrays, (self.num_x, self.structure)

    @classmethod
    def tree_unflatten(cls, static: tuple, arrays: tuple) -> "LayerCall":
        """The inverse of `tree_flatten`."""
        return cls(tuple(arrays), *static)


def in_structure(layer: str, output: Any, x: Sequence[Array]) -> Any:
    """Activations in the structure of a layer's output.

    Args:
      layer: the layer, for the error.
      output: structure of its output.
      x: the activations.

    Raises:
      ValueError: the output has another number of arrays.
    """
    if output.num_leaves != len(x):
        raise ValueError(
            f"{layer} takes {len(x)} arrays of activations and returns "
            f"{output.num_leaves} arrays: layers that meshpar runs one by one return "
            "their activations alone"
        )
    return jax.tree.unflatten(output, x)


def influenced(fn: Callable[[Params], dict[int, Array]], params: Params) -> set[int]:
    """Keys of the results of fn(params) that depend on any of the params."""
    keys: list[int] = []

    def flat(params: Params) -> list[Array]:
        results = fn(params)
        keys.extend(results)
        return list(results.values())

    jaxpr = jax.make_jaxpr(flat)(params).jaxpr
    reached = set(jaxpr.invars)

    def is_reached(atom: Any) -> bool:
        return not isinstance(atom, core.Literal) and atom in reached

    for eqn in jaxpr.eqns:
        if any(map(is_reached, eqn.invars)):
            reached.update(eqn.outvars)
    outputs = zip(keys, jaxpr.outvars, strict=True)
    return {key for key, atom in outputs if is_reached(atom)}


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, traced or not."""
    return isinstance(leaf, jax.Array | np.ndarray)


def _is_random_key(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def is_floating(leaf: Any) -> bool:
    """Whether a leaf is a floating-point array."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else repr(leaf)
