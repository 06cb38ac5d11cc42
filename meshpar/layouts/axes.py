"""Mesh axes: one record per axis of a device mesh.

A record says what its axis splits and which links the axis may cross. Layouts, rules,
meshes, batches and contracts follow the records. A new axis is one record here and one
field of `Layout`; no other file writes an axis name as a string.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

REPLICA, PIPE, DATA, FSDP = "replica", "pipe", "data", "fsdp"
EXPERT, CONTEXT, TENSOR = "expert", "context", "tensor"


@dataclasses.dataclass(frozen=True)
class Axis:
    """Properties of one mesh axis.

    Attributes:
      name: in layout strings and in `jax.sharding.Mesh.axis_names`.
      doc: one line of documentation, for generated pages: a verb and its object.
      splits_batch: dims of a batch leaf that the axis splits, "batch" or "length".
      param_dims: dims of parameters that the default rules split over the axis.
      activation_dims: dims of activations that the default rules split over the axis.
      gathers_weights: whether weights are sharded along the axis and gathered before
        use; otherwise each device computes with the shard that it holds.
      manual: whether the shard_map lowering writes the collectives of the axis;
        otherwise the compiler inserts them.
      crosses_slices: whether the axis may cross the slow links between slices (DCN).
      needs_sharded_params: whether a layout is refused if the axis is larger than 1
        and shards no parameter.
    """

    name: str
    doc: str
    splits_batch: tuple[str, ...] = ()
    param_dims: tuple[str, ...] = ()
    activation_dims: tuple[str, ...] = ()
    gathers_weights: bool = False
    manual: bool = True
    crosses_slices: bool = False
    needs_sharded_params: bool = False


RECORDS: tuple[Axis, ...] = (
    Axis(
        REPLICA,
        "holds replicas that train apart and synchronize now and then (local SGD)",
        crosses_slices=True,
    ),
    Axis(
        PIPE,
        "splits the stack of layers into stages (pipeline parallelism)",
        param_dims=("layers",),
        crosses_slices=True,
        needs_sharded_params=True,
    ),
    Axis(
        DATA,
        "splits the batch and replicates parameters (data parallelism)",
        splits_batch=("batch",),
        activation_dims=("cache_batch",),
        crosses_slices=True,
    ),
    Axis(
        FSDP,
        "splits the batch and shards the training state (ZeRO)",
        splits_batch=("batch",),
        param_dims=("embed",),
        activation_dims=("cache_batch",),
        gathers_weights=True,
        needs_sharded_params=True,
    ),
    Axis(
        EXPERT,
        "splits the batch, and the experts inside mixtures of experts",
        splits_batch=("batch",),
        param_dims=("expert",),
        activation_dims=("cache_batch",),
        needs_sharded_params=True,
    ),
    Axis(
        CONTEXT,
        "splits the length of sequences (context parallelism)",
        splits_batch=("length",),
        activation_dims=("residual_length", "cache_length"),
    ),
    Axis(
        TENSOR,
        "splits heads, mlp and vocab, and the length between blocks (Megatron)",
        param_dims=("mlp", "heads", "kv_heads", "vocab"),
        activation_dims=("residual_length", "mlp", "heads", "kv_heads", "vocab"),
        manual=False,
        needs_sharded_params=True,
    ),
)
"""The axes of every mesh, outer (slowest link) to inner."""

AXES: tuple[str, ...] = tuple(axis.name for axis in RECORDS)
"""Names of the mesh axes, outer to inner."""


def names_of(**traits: object) -> tuple[str, ...]:
    """Names of the axes whose records have these values, outer to inner."""
    return tuple(
        axis.name
        for axis in RECORDS
        if all(getattr(axis, trait) == value for trait, value in traits.items())
    )


def ways_of(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Number of devices along several axes together.

    Args:
      axes: names of mesh axes.
      sizes: {mesh axis: size}.
    """
    return math.prod(sizes[axis] for axis in axes)


def in_use(axes: Iterable[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes among some that are larger than 1.

    Args:
      axes: names of mesh axes.
      sizes: {mesh axis: size}.
    """
    return tuple(axis for axis in axes if sizes[axis] > 1)


BATCH_DIMS: dict[str, tuple[str, ...]] = {
    dim: tuple(axis.name for axis in RECORDS if dim in axis.splits_batch)
    for dim in ("batch", "length")
}
"""{dim of a batch leaf: the axes that split it}, in the order of a leaf's dims.

`replica` is not among them: each replica reads its own part of the global batch.
"""

BATCH_AXES: tuple[str, ...] = BATCH_DIMS["batch"]
"""The axes that split the rows of a batch."""

TOKEN_AXES: tuple[str, ...] = tuple(axis.name for axis in RECORDS if axis.splits_batch)
"""The axes that split any dim of a batch."""

GATHERED_AXES: tuple[str, ...] = names_of(gathers_weights=True)
"""The axes along which weights are gathered before use."""

HELD_AXES: tuple[str, ...] = names_of(gathers_weights=False, needs_sharded_params=True)
"""The axes along which each device computes with the part of a weight that it holds.

An axis that splits the batch does so for the dims of its record alone (`is_held`).
"""

MANUAL_AXES: tuple[str, ...] = names_of(manual=True)
"""The axes whose collectives the shard_map lowering writes."""

SLOW_AXES: tuple[str, ...] = names_of(crosses_slices=True)
"""The axes that may cross the links between slices (DCN)."""

_BY_NAME = {axis.name: axis for axis in RECORDS}


def is_held(axis: str, dim: Any) -> bool:
    """Whether each device computes with its part of a dim that an axis splits.

    Otherwise the dim is gathered before use: `expert` holds the dim of the experts, and
    the embed dim of other weights may be sharded over it as over `fsdp`.

    Args:
      axis: name of a mesh axis.
      dim: name of a parameter's dim, a tuple of names, or None.
    """
    if axis not in HELD_AXES or axis not in TOKEN_AXES:
        return axis in HELD_AXES
    names = dim if isinstance(dim, tuple) else (dim,)
    return any(name in _BY_NAME[axis].param_dims for name in names)


def check_fields(fields: tuple[str, ...]) -> None:
    """Asserts that the fields of a layout that are sizes are the axes, in order."""
    assert fields == AXES, (
        f"Layout has the axis sizes {', '.join(fields)} before zero, but axes.RECORDS "
        f"are {', '.join(AXES)}; give Layout one field per record, in their order"
    )
