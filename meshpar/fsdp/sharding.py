"""Manual shardings: the dims of a tensor that manual mesh axes split."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, Params
from meshpar.errors import LayoutError
from meshpar.fsdp.product import Product
from meshpar.layouts.plan import Spec, partition_spec


def entry_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


@dataclasses.dataclass(frozen=True)
class ManualSharding:
    """Dims of one tensor that manual axes split, and dims that automatic axes split.

    Attributes:
      splits: (dim, axes) of every dim that manual axes split.
      rest: the manual axes over which the tensor is whole.
      automatic: spec with the automatic axes only.
      lanes: numbers of which each device gathers a multiple where arrays are flat.
    """

    splits: tuple[tuple[int, tuple[str, ...]], ...]
    rest: tuple[str, ...]
    automatic: PartitionSpec
    lanes: int = 1

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def of(
        cls, path: str, spec: Spec, manual_axes: tuple[str, ...], lanes: int = 1
    ) -> "ManualSharding":
        """Makes the sharding of a tensor.

        Args:
          path: the tensor's path, for errors.
          spec: mesh axes per dim.
          manual_axes: the axes of the shard_map.
          lanes: as the attribute.

        Raises:
          LayoutError: a dim is split by an automatic axis before a manual one.
        """
        splits, automatic = [], []
        for dim, axes in enumerate(spec):
            manual = tuple(axis for axis in axes if axis in manual_axes)
            if manual != axes[: len(manual)]:
                raise LayoutError(
                    f"{path}: dim {dim} splits over {'*'.join(axes)}; write data and "
                    "fsdp before tensor in its rule"
                )
            if manual:
                splits.append((dim, manual))
            automatic.append(axes[len(manual) :])
        split = {axis for _, axes in splits for axis in axes}
        rest = tuple(axis for axis in manual_axes if axis not in split)
        return cls(tuple(splits), rest, partition_spec(tuple(automatic)), lanes)

    @property
    def axes(self) -> tuple[str, ...]:
        """All manual axes that split the tensor."""
        return tuple(axis for _, axes in self.splits for axis in axes)

    @property
    def automatic_axes(self) -> frozenset[str]:
        """The automatic axes that split the tensor."""
        return frozenset(a for entry in self.automatic for a in entry_axes(entry))

    @property
    def alone(self) -> bool:
        """Whether the tensor cannot share a bucket: more than one dim is split."""
        return len(self.splits) > 1

    @functools.cached_property
    def layer(self) -> "ManualSharding":
        """The sharding of one layer of a stack."""
        splits = tuple((dim - 1, axes) for dim, axes in self.splits)
        automatic = PartitionSpec(*self.automatic[1:])
        return dataclasses.replace(self, splits=splits, automatic=automatic)


def automatic_specs(
    shardings: Mapping[str, ManualSharding],
) -> dict[str, PartitionSpec]:
    """{path: how automatic axes split a tensor} of {path: its sharding}."""
    return {path: sharding.automatic for path, sharding in shardings.items()}


def automatic_axes() -> set[str]:
    """The axes with several devices that are automatic here."""
    mesh = jax.sharding.get_abstract_mesh()
    return {
        a for a in mesh.axis_names if a not in mesh.manual_axes and mesh.shape[a] > 1
    }


def on_local_shards(
    move: Callable[[Any], Params],
    tree: Mapping[str, Array | Product],
    shardings: Mapping[str, ManualSharding],
) -> Params:
    """Calls `move` with the automatic axes made manual, too: on each device's shards.

    Otherwise the compiler would make tensors whole over the automatic axes before a
    collective, and TPUs would turn a reduce_scatter into an all_reduce, even if these
    axes have size 1. Products are there only if all of them have size 1.
    """
    kinds = jax.sharding.get_abstract_mesh()
    axes = set(kinds.axis_names) - set(kinds.manual_axes)
    specs = {path: shardings[path].automatic for path in tree}
    if not axes or not tree:
        return move(tree)
    in_specs = {
        path: PartitionSpec() if isinstance(x, Product) else specs[path]
        for path, x in tree.items()
    }
    mapped = jax.shard_map(move, in_specs=(in_specs,), out_specs=specs, axis_names=axes)
    return mapped(tree)
