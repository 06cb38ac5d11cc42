"""Weights gathered by a constraint, where XLA's own gathers go wrong."""

from collections.abc import Collection

from jax.sharding import PartitionSpec

from meshpar.layouts.axes import TOKEN_AXES
from meshpar.layouts.plan import Plan, partition_spec


def gathered_specs(
    plan: Plan, axes_in_use: Collection[str]
) -> dict[str, PartitionSpec]:
    """Specs of the gathered weights; none where XLA may gather them itself.

    With batches split over `data` and `fsdp`, and weights over `fsdp` and `tensor`,
    XLA's partitioner computes wrong gradients and sometimes a wrong loss, unless the
    model constrains its activations (seen in jaxlib 0.10.2 and 0.12.0 with matmuls,
    convolutions and attention).

    Args:
      plan: specs of the weights.
      axes_in_use: mesh axes larger than 1.
    """
    token_axes = set(axes_in_use) & set(TOKEN_AXES)
    automatic = set(axes_in_use) - token_axes
    gathers = any(leaf.held != leaf.spec for leaf in plan.weights.values())
    if not automatic or not gathers or len(token_axes) < 2:
        return {}
    return {path: partition_spec(leaf.held) for path, leaf in plan.weights.items()}
