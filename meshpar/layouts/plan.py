"""Strict resolution: a layout's rules laid over one model, a spec for every leaf.

A `Plan` says for every parameter, gradient and optimizer leaf how it is sharded, which
rule decided and why, and what it costs per device. What cannot be honoured is an error
that names the tensor, the rule and the remedy; nothing is silently replicated.
"""

import dataclasses
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from meshpar.layouts.layout import Layout

Spec = tuple[tuple[str, ...], ...]
"""Mesh axes per dim, in the order of the dims; () leaves a dim whole."""


def partition_spec(spec: Spec) -> PartitionSpec:
    """Turns axes per dim into a PartitionSpec."""
    return PartitionSpec(*(a[0] if len(a) == 1 else a or None for a in spec))


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """How one tensor of the training state is laid out.

    Attributes:
      path: the parameter's path, or the optimizer leaf's key path.
      kind: "parameter", "weight", "gradient", "optimizer" or "synchronization".
      shape: logical shape.
      dtype: its dtype.
      names: dim names, None where the leaf has none.
      spec: mesh axes per dim.
      reason: which rule won or lost for each dim.
      bytes_per_device: bytes of one device's shard.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: Any
    names: tuple | None
    spec: Spec
    reason: str
    bytes_per_device: int

    @property
    def partition_spec(self) -> PartitionSpec:
        """The spec as jax takes it."""
        return partition_spec(self.spec)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A layout resolved for one model and optimizer.

    Attributes:
      layout: the layout.
      parameters: {path: LeafPlan} of the master weights, which the optimizer updates:
        sharded over every axis, whatever `zero` says.
      weights: the copies that the loss computes with, in its dtype: whole over `fsdp`
        during a step under zero=1 and 2, and one layer at a time under zero=3.
      gradients: as the backward pass holds them, in the dtype of the weights.
      optimizer: one LeafPlan per optimizer leaf, in tree order.
      optimizer_specs: PartitionSpecs with the structure of the optimizer state.
      synchronization: what each device keeps to synchronize replicas (local SGD).
    """

    layout: Layout
    parameters: dict[str, LeafPlan]
    weights: dict[str, LeafPlan]
    gradients: dict[str, LeafPlan]
    optimizer: tuple[LeafPlan, ...]
    optimizer_specs: Any
    synchronization: tuple[LeafPlan, ...] = ()

    @property
    def specs(self) -> dict[str, PartitionSpec]:
        """{path: spec} of master weights, and of gradients when the optimizer runs."""
        return {path: leaf.partition_spec for path, leaf in self.parameters.items()}

    def bytes_per_device(self) -> dict[str, int]:
        """Bytes on one device by kind, exact.

        Parameters and optimizer state live from step to step. Weights and gradients
        live within a step; under zero=3 the weights' shards are counted, without the
        layer that is gathered.
        """
        return {
            "parameters": sum(p.bytes_per_device for p in self.parameters.values()),
            "optimizer": sum(p.bytes_per_device for p in self.optimizer),
            "weights": sum(p.bytes_per_device for p in self.weights.values()),
            "gradients": sum(p.bytes_per_device for p in self.gradients.values()),
            "synchronization": sum(p.bytes_per_device for p in self.synchronization),
        }

    def __str__(self) -> str:
        lines = [f"layout {self.layout}"]
        for leaf in (
            *self.parameters.values(),
            *self.optimizer,
            *self.synchronization,
        ):
            shape = "x".join(map(str, leaf.shape)) or "scalar"
            where = ", ".join("*".join(axes) or "-" for axes in leaf.spec)
            lines.append(
                f"{leaf.kind:9} {leaf.path}  {shape} {np.dtype(leaf.dtype).name}  "
                f"[{where}]  {leaf.bytes_per_device} B/device  {leaf.reason}"
            )
        totals = ", ".join(f"{k} {v}" for k, v in self.bytes_per_device().items())
        return "\n".join([*lines, f"bytes per device: {totals}"])
