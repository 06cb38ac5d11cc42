"""Residuals that a forward pass saves for a backward pass, as one pytree.

`jax.vjp` returns a function that is a pytree: its leaves are arrays, its structure is
code. `Saved` holds both, so that the arrays can pass through scans and buffers, and
their receiver can run the backward pass.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array, Params, to_device, to_host
from meshpar.fsdp.buckets import TILE


@dataclasses.dataclass(frozen=True, eq=False)
class _Structure:
    """The static part of a `Saved`; equal in all traces of one function."""

    reader: Any
    key_impls: tuple[Any, ...]
    kind: tuple

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure) and self.kind == other.kind

    def __hash__(self) -> int:
        return hash(self.kind)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Saved:
    """Arrays that one pass saves for another.

    Attributes:
      arrays: plain arrays; random keys are saved as their data, as a buffer cannot
        hold keys.
      structure: the reader of the arrays.
    """

    arrays: list[Array]
    structure: _Structure

    @classmethod
    def of(cls, arrays: list[Array], reader: Any, *kind: Any) -> "Saved":
        """Saves arrays for `reader`.

        Args:
          arrays: any arrays, including random keys.
          reader: an object that uses the arrays, such as a `VjpReader`.
          *kind: hashable values that are equal in all traces of one function.
        """
        impls = tuple(
            jax.random.key_impl(x)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else None
            for x in arrays
        )
        plain = [
            x if impl is None else jax.random.key_data(x)
            for x, impl in zip(arrays, impls, strict=True)
        ]
        return cls(plain, _Structure(reader, impls, (type(reader), len(arrays), *kind)))

    @property
    def reader(self) -> Any:
        """The object that uses the arrays."""
        return self.structure.reader

    def unpack(self) -> list[Array]:
        """The arrays as given to `of`, including random keys."""
        return [
            x if impl is None else jax.random.wrap_key_data(x, impl=impl)
            for x, impl in zip(self.arrays, self.structure.key_impls, strict=True)
        ]

    def on_host(self) -> "Saved":
        """These residuals with their activations in host memory.

        Keys, integers and what is smaller than a tile stay: the TPU compiler cannot
        copy the small masks that attention kernels save.
        """
        arrays = [to_host(x) if _moves(x) else x for x in self.arrays]
        return dataclasses.replace(self, arrays=arrays)

    def on_device(self) -> "Saved":
        """The inverse of `on_host`."""
        arrays = [to_device(x) if _moves(x) else x for x in self.arrays]
        return dataclasses.replace(self, arrays=arrays)

    def tree_flatten(self) -> tuple[tuple, _Structure]:
        """The arrays as children, the structure as static data."""
        return tuple(self.arrays), self.structure

    @classmethod
    def tree_unflatten(cls, structure: _Structure, arrays: tuple) -> "Saved":
        """The inverse of `tree_flatten`."""
        return cls(list(arrays), structure)


def _moves(x: Array) -> bool:
    """Whether an array that one layer saves leaves the device."""
    return x.size >= math.prod(TILE) and jnp.issubdtype(x.dtype, jnp.floating)


class Slot(NamedTuple):
    """Residuals of the layers of one pass, in a buffer for several passes.

    Layers read and write the buffer itself. A slot that is taken out or put in whole is
    a copy, of as many bytes as the layers save.

    Attributes:
      buffer: [slots, layers, ...].
      number: of the slot, int32.
    """

    buffer: Saved
    number: Array

    def layer(self, index: Array) -> Saved:
        """The residuals of one layer."""

        def read(x: Array) -> Array:
            start = self.number, index, *[0] * (x.ndim - 2)
            return lax.dynamic_slice(x, start, (1, 1, *x.shape[2:]))[0, 0]

        return jax.tree.map(read, self.buffer)

    def with_layer(self, index: Array, saved: Saved) -> "Slot":
        """This slot with the residuals of one layer."""

        def written(x: Array, new: Array) -> Array:
            start = self.number, index, *[0] * (x.ndim - 2)
            return lax.dynamic_update_slice(x, new.astype(x.dtype)[None, None], start)

        return self._replace(buffer=jax.tree.map(written, self.buffer, saved))


class Residuals(NamedTuple):
    """Residuals of several layers.

    Attributes:
      layers: those of each layer, [layers, ...]; a list of them where the layers run
        without a loop; or their slot in a buffer.
      kept: activations that all layers pass on as they are.
    """

    layers: Saved | list[Saved] | Slot
    kept: tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class VjpReader:
    """The structure of a vjp function, without its arrays and weights.

    Attributes:
      treedef: structure of the vjp function.
      weights: for each of its leaves the path of the weight, or None for an array.
    """

    treedef: Any
    weights: tuple[str | None, ...]

    @classmethod
    def save(cls, vjp: Callable, weights: Params) -> Saved:
        """Saves a vjp function without its weights, which are gathered again."""
        leaves, treedef = jax.tree.flatten(vjp)
        paths = tuple(
            next((path for path, w in weights.items() if w is leaf), None)
            for leaf in leaves
        )
        arrays = [x for x, path in zip(leaves, paths, strict=True) if path is None]
        return Saved.of(arrays, cls(treedef, paths), paths)

    def vjp(self, saved: Saved, weights: Params) -> Callable:
        """The vjp function, with the given weights in place of the saved paths."""
        arrays = iter(saved.unpack())
        leaves = [next(arrays) if p is None else weights[p] for p in self.weights]
        return jax.tree.unflatten(self.treedef, leaves)
