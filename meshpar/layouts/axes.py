"""Mesh axes: one record per axis of a device mesh.

A record says what the axis splits and where it may lie. Layouts, rules, meshes, batches
and contracts are derived from the records, so no other file names an axis in a string.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Axis:
    """What one mesh axis does.

    Attributes:
      name: as it stands in layout strings and in `jax.sharding.Mesh.axis_names`.
      doc: one line of documentation.
      splits_batch: dims of a batch leaf that the axis splits, "batch" or "length".
      param_dims: dims of parameters that the default rules split over it.
      activation_dims: dims of activations that the default rules split over it.
      gathers_weights: whether weights are sharded along it and gathered before use;
        otherwise each device computes with what it holds.
      manual: whether the shard_map lowering writes its collectives; otherwise the
        compiler inserts them.
      crosses_slices: whether it may cross the slow links between slices (DCN).
      needs_sharded_params: whether an axis larger than 1 that shards no parameter is
        an error.
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
        "replica",
        "replicas that train apart and are synchronized now and then (local SGD)",
        crosses_slices=True,
    ),
    Axis(
        "pipe",
        "splits the stack of layers into stages (pipeline parallelism)",
        param_dims=("layers",),
        crosses_slices=True,
        needs_sharded_params=True,
    ),
    Axis(
        "data",
        "splits the batch and replicates parameters (data parallelism)",
        splits_batch=("batch",),
        crosses_slices=True,
    ),
    Axis(
        "fsdp",
        "splits the batch and shards the training state (ZeRO)",
        splits_batch=("batch",),
        param_dims=("embed",),
        gathers_weights=True,
        needs_sharded_params=True,
    ),
    Axis(
        "tensor",
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

REPLICA, PIPE, DATA, FSDP, TENSOR = AXES


def names_of(**traits: object) -> tuple[str, ...]:
    """Names of the axes whose records have these values, outer to inner."""
    return tuple(
        axis.name
        for axis in RECORDS
        if all(getattr(axis, trait) == value for trait, value in traits.items())
    )


BATCH_DIMS: dict[str, tuple[str, ...]] = {
    dim: tuple(axis.name for axis in RECORDS if dim in axis.splits_batch)
    for dim in ("batch", "length")
}
"""{dim of a batch leaf: the axes that split it}, in the order of a leaf's dims.

Each replica has its own part of the batch.
"""

BATCH_AXES: tuple[str, ...] = BATCH_DIMS["batch"]
"""The axes over which the rows of a batch are split."""

TOKEN_AXES: tuple[str, ...] = sum(BATCH_DIMS.values(), ())
"""The axes over which a batch is split in any of its dims."""

SLOW_AXES: tuple[str, ...] = names_of(crosses_slices=True)
"""The axes that may cross the links between slices (DCN)."""
