"""What `fsdp` moves, as terms of a contract."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.collectives.transport import NO_RINGS, Rings
from meshpar.contracts.contract import DeclaredCollective
from meshpar.fsdp.buckets import is_large, make_buckets, padding
from meshpar.fsdp.sharding import ManualSharding

Shapes = dict[str, jax.ShapeDtypeStruct]


def num_bytes(x: jax.ShapeDtypeStruct) -> int:
    """Bytes of a tensor."""
    return math.prod(x.shape) * jnp.dtype(x.dtype).itemsize


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


class FsdpTerms:
    """Counts the collectives that `fsdp` makes of dicts of tensors.

    Attributes:
      sizes: {mesh axis: size}.
    """

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = sizes

    def ways(self, axes: Iterable[str]) -> int:
        """Devices that axes span together."""
        return math.prod(self.sizes[axis] for axis in axes)

    def local(
        self, x: jax.ShapeDtypeStruct, sharding: ManualSharding
    ) -> jax.ShapeDtypeStruct:
        """What one device moves of a tensor: its shard over the automatic axes."""
        shape = list(x.shape)
        for dim, entry in enumerate(sharding.automatic):
            shape[dim] //= self.ways(_axes(entry))
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    def split_terms(
        self,
        kind: str,
        shapes: Shapes,
        shardings: Mapping[str, ManualSharding],
        runs: int,
        why: str,
        rings: Rings,
    ) -> Iterator[DeclaredCollective]:
        """Gathers or reduce_scatters of whole tensors over the axes that split them."""
        scatters = kind == "reduce_scatter"
        found: dict[tuple, list[int]] = {}
        split = {
            path: self.local(x, shardings[path])
            for path, x in shapes.items()
            if shardings[path].splits
        }
        for axes in dict.fromkeys(shardings[path].axes for path in split):
            group = {p: x for p, x in split.items() if shardings[p].axes == axes}
            for paths in make_buckets(group, shardings, 1):
                large = len(paths) == 1 and is_large(num_bytes(group[paths[0]]))
                around = rings if scatters or large else NO_RINGS
                for stage_axes, size in self._stages(kind, paths, group, shardings):
                    ringed = around.has(stage_axes)
                    total = found.setdefault((stage_axes, ringed), [0, 0])
                    total[0] += 1
                    total[1] += size
        for (axes, ringed), (count, size) in found.items():
            ways, kind_found, why_found = self.ways(axes), kind, why
            if ringed:
                count *= sum(shape := rings.shapes[axes[0]]) - len(shape)
                size = size // ways * (ways - 1)
                kind_found, why_found = "permute", f"{why}, around rings"
            yield DeclaredCollective(
                kind_found,
                axes,
                ways,
                runs * count,
                runs * size,
                why_found,
                gathers=not scatters,
            )

    def _stages(
        self,
        kind: str,
        paths: list[str],
        shapes: Shapes,
        shardings: Mapping[str, ManualSharding],
    ) -> Iterator[tuple[tuple[str, ...], int]]:
        """(axes, bytes) of every collective that makes one bucket whole."""
        if len(paths) > 1:
            axes, dtype = shardings[paths[0]].axes, shapes[paths[0]].dtype
            ways = self.ways(axes)
            size = sum(math.prod(shapes[path].shape) for path in paths)
            if kind == "reduce_scatter":
                size += ways * padding(size // ways)
            yield axes, size * jnp.dtype(dtype).itemsize
            return
        (path,) = paths
        size = num_bytes(shapes[path])
        for _, axes in reversed(shardings[path].splits):
            yield axes, size
            size //= self.ways(axes)

    def reduced_terms(
        self, shards: Shapes, shardings: Mapping[str, ManualSharding], why: str
    ) -> Iterator[DeclaredCollective]:
        """All_reduces of shards over the axes that do not split them."""
        for axes in dict.fromkeys(shardings[path].rest for path in shards):
            group = {
                path: self.local(x, shardings[path])
                for path, x in shards.items()
                if shardings[path].rest == axes
            }
            if not axes:
                continue
            count = sum(1 for _ in make_buckets(group, shardings, 1))
            size = sum(map(num_bytes, group.values()))
            yield DeclaredCollective(
                "all_reduce", axes, self.ways(axes), count, size, why
            )
