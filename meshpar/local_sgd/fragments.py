"""Flat fragments: one device's shards as a vector, cut up for synchronization.

    vector     all shards of one device in float32, padded with zeros
    fragment   1/F of the vector; fragments are synchronized one after the other
    slice      1/S of a fragment; one slice is scattered per step
    piece      1/R of a slice; each replica runs the outer optimizer on one

Every device packs only its own shards, so synchronization crosses no mesh axis but
`replica`. Array suffixes: F fragments, S slices of a fragment, K numbers of a slice,
P numbers of a piece (K/R).
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array, Params
from meshpar.layouts.axes import REPLICA
from meshpar.layouts.plan import Plan


def shard_shapes(plan: Plan, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """{path: shape of one device's shard} of what is trained, by sizes of mesh axes."""
    return {
        path: tuple(
            size // math.prod(sizes[axis] for axis in axes)
            for size, axes in zip(leaf.shape, leaf.spec, strict=True)
        )
        for path, leaf in plan.trained(plan.parameters).items()
    }


@dataclasses.dataclass(frozen=True)
class Fragments:
    """The cut of one device's shards into fragments, slices and pieces.

    Attributes:
      shapes: {path: shape of this device's shard}, in the order of the vector.
      num_fragments: F.
      num_slices: S, slices of a fragment.
      replicas: R, pieces of a slice.
      piece_multiple: the length of a piece is a multiple of this.
    """

    shapes: Mapping[str, tuple[int, ...]]
    num_fragments: int
    num_slices: int
    replicas: int
    piece_multiple: int = 1

    @functools.cached_property
    def piece_size(self) -> int:
        """P, numbers of a piece."""
        size = sum(map(math.prod, self.shapes.values()))
        pieces = self.num_fragments * self.num_slices * self.replicas
        return -(-size // (pieces * self.piece_multiple)) * self.piece_multiple

    @property
    def slice_size(self) -> int:
        """K, numbers of a slice."""
        return self.replicas * self.piece_size

    @property
    def fragment_size(self) -> int:
        """Numbers of a fragment, S * K."""
        return self.num_slices * self.slice_size

    def _intervals(self, fragment: int) -> Iterator[tuple[str, int, int]]:
        """(path, start, stop) of the flat shards in a fragment, in order."""
        start = fragment * self.fragment_size
        stop, offset = start + self.fragment_size, 0
        for path, shape in self.shapes.items():
            length = math.prod(shape)
            low, high = max(start, offset), min(stop, offset + length)
            if low < high:
                yield path, low - offset, high - offset
            offset += length

    def pack(self, params: Params, fragment: int) -> Array:
        """Packs this device's shards {path: array} into a fragment [S, K], float32."""
        parts = [
            params[path].reshape(-1)[start:stop].astype(jnp.float32)
            for path, start, stop in self._intervals(fragment)
        ]
        flat = jnp.concatenate([*parts, jnp.zeros(0, jnp.float32)])
        flat = jnp.pad(flat, (0, self.fragment_size - len(flat)))
        return flat.reshape(self.num_slices, self.slice_size)

    def unpack(self, params: Params, fragment: int, packed_SK: Array) -> Params:
        """Returns the shards with a fragment's numbers written back."""
        params, flat, offset = dict(params), packed_SK.reshape(-1), 0
        for path, start, stop in self._intervals(fragment):
            old = params[path]
            new = flat[offset : offset + stop - start].astype(old.dtype)
            params[path] = old.reshape(-1).at[start:stop].set(new).reshape(old.shape)
            offset += stop - start
        return params

    def own_piece(self, slice_K: Array) -> Array:
        """This replica's piece [P] of a slice [K]; call inside shard_map."""
        start = lax.axis_index(REPLICA) * self.piece_size
        return lax.dynamic_slice_in_dim(slice_K, start, self.piece_size)
