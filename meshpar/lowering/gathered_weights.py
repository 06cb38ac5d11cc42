"""Weights gathered over `fsdp` by a constraint, where XLA's own gathers go wrong."""

from collections.abc import Collection

from jax.sharding import PartitionSpec

from meshpar.layouts.axes import GATHERED_AXES, TOKEN_AXES
from meshpar.layouts.plan import Plan, partition_spec


def gathered_specs(
    plan: Plan, axes_in_use: Collection[str]
) -> dict[str, PartitionSpec]:
    """Specs of the weights without `fsdp`; none where XLA may gather them itself.

    With batches split over `data` and `fsdp`, and weights over `fsdp` and `tensor`,
    XLA's partitioner computes wrong gradients and sometimes a wrong loss, unless the
    model constrains its activations (seen in jaxlib 0.10.2 and 0.12.0 with matmuls,
    convolutions and attention).

    Args:
      plan: specs of the weights.
      axes_in_use: mesh axes larger than 1.
    """
    kinds = (GATHERED_AXES, set(TOKEN_AXES) - set(GATHERED_AXES))
    automatic = set(axes_in_use) - set(TOKEN_AXES)
    if not automatic or not all(set(kind) & set(axes_in_use) for kind in kinds):
        return {}
    return {
        path: partition_spec(
            tuple(tuple(a for a in dim if a not in GATHERED_AXES) for dim in leaf.spec)
        )
        for path, leaf in plan.weights.items()
    }
