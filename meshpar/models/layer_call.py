"""Calls of layers: values that a cut model hands from layer to layer (`layer_cut`)."""

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.arrays import Array
from meshpar.errors import MeshparError


class Source(NamedTuple):
    """Where an argument of a layer comes from.

    Attributes:
      kind: "x", the activations; "kept", other arrays with a gradient; "fixed", all
        other arrays; "value", what is no array of the step.
      which: number among those of its kind, or the value.
    """

    kind: str
    which: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Configuration:
    """A layer without its arrays; equal for layers that may run as one.

    Attributes:
      value: with which the layer runs.
      key: what is compared.
      own: {attribute: value} of what is not compared, as all layers differ in it (a
        number, a name): no layer may read it.
    """

    value: Any
    key: Any
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Configuration) and self.key == other.key

    def __hash__(self) -> int:
        return hash(type(self.value))


def distinguishing(attributes: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The attributes in which each layer differs from all others.

    Args:
      attributes: {attribute: value} of every layer.
    """
    if len(attributes) < 2:
        return frozenset()
    shared = set(attributes[0]).intersection(*attributes[1:])
    kinds = int, float, str

    def differ(name: str) -> bool:
        values = [own[name] for own in attributes]
        plain = all(isinstance(v, kinds) for v in values)
        return plain and len(set(values)) == len(values)

    return frozenset(filter(differ, shared))


def comparable(value: Any, of_framework: Callable[[Any], Any] = lambda x: x) -> Any:
    """A value that is equal for values that compute the same.

    Layers make functions of their own, such as initializers and partial functions,
    which Python tells apart.

    Args:
      value: an attribute of a layer.
      of_framework: the same for what only a framework knows, such as its modules;
        returns what it does not know.
    """

    def of(value: Any) -> Any:
        if (found := of_framework(value)) is not value:
            return found
        if isinstance(value, tuple | list):
            return [of(x) for x in value]
        if isinstance(value, Mapping):
            return {key: of(x) for key, x in value.items()}
        if isinstance(value, np.ndarray | jax.Array):
            return value.shape, value.dtype, np.asarray(value).tobytes()
        if isinstance(value, functools.partial):
            return of((value.func, value.args, value.keywords))
        if isinstance(value, types.MethodType):
            return of((value.__func__, value.__self__))
        if isinstance(value, types.FunctionType):
            cells = [of(cell.cell_contents) for cell in value.__closure__ or ()]
            defaults = value.__defaults__, value.__kwdefaults__
            return value.__code__, of(defaults), cells
        return value

    return of(value)


@dataclasses.dataclass(frozen=True)
class Column:
    """A layer of the first row, as the loss function calls it.

    Attributes:
      configuration: what the layer is beside its arrays.
      tree: structure of (args, kwargs).
      sources: of each leaf of the arguments.
      returned: numbers of the leaves of its output that are the next activations.
      reads: what of this layer the loss reads (`layer_reads.Reads`).
    """

    configuration: Configuration
    tree: Any
    sources: tuple[Source, ...]
    returned: tuple[int, ...]
    reads: Any

    def __hash__(self) -> int:
        return hash(self.tree)  # Values and configurations may have no hash.

    def arguments(
        self, x: Sequence[Array], kept: Sequence[Array], context: Sequence[Array]
    ) -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs) of the call."""
        arrays: Mapping[str, Any] = {"x": x, "kept": kept, "fixed": context}
        leaves = (
            source.which
            if source.kind == "value"
            else arrays[source.kind][source.which]
            for source in self.sources
        )
        return jax.tree.unflatten(self.tree, leaves)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class LayerCall:
    """The activations that a layer is called with.

    Attributes:
      x: what every layer returns with new values.
      kept: other arguments that a gradient passes through.
      read: for each column, the values that the loss reads of its layers, those of all
        rows in one array each; a row puts its own at the end.
      columns: the layers of the first row.
    """

    x: tuple[Array, ...]
    kept: tuple[Array, ...]
    read: tuple[tuple[Array, ...], ...]
    columns: tuple[Column, ...]

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """The arrays as children, all else as static data."""
        return (self.x, self.kept, self.read), self.columns

    @classmethod
    def tree_unflatten(cls, columns: tuple, arrays: tuple) -> "LayerCall":
        """The inverse of `tree_flatten`."""
        return cls(*arrays, columns)


def array_leaves(leaves: Sequence[Any]) -> list[Array]:
    """The arrays among some leaves."""
    return [jnp.asarray(leaf) for leaf in leaves if is_array(leaf)]


def check_arguments(layer: str, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuses a call that no layer of a stack can have.

    Raises:
      MeshparError: no positional argument, a first argument that holds anything but
        floating-point arrays, or a random key.
    """
    first = jax.tree.leaves(args[:1])
    if not first or not all(map(is_floating, first)):
        found = ", ".join(map(describe, first)) or "nothing"
        raise MeshparError(
            f"{layer} is called with {found} as its first positional argument: "
            "layers that meshpar runs one by one take floating-point activations "
            "there"
        )
    arrays = filter(is_array, jax.tree.leaves((args, kwargs)))
    if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in arrays):
        raise MeshparError(
            f"{layer} is called with a random key, with which all layers would draw "
            "the same numbers; give its module random streams of its own"
        )


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, traced or not."""
    return isinstance(leaf, jax.Array | np.ndarray)


def is_floating(leaf: Any) -> bool:
    """Whether a leaf is a floating-point array."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def describe(leaf: Any) -> str:
    """A leaf of the arguments, for errors."""
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else repr(leaf)
