"""Plans: the sharding of every leaf of the training state under one layout.

A `Plan` gives for every parameter, gradient and optimizer leaf its mesh axes, the rule
that decided them, and its bytes per device. `resolve.make_plan` makes it.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Self

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshpar.arrays import dtype_name
from meshpar.errors import LayoutError
from meshpar.layouts.axes import is_held
from meshpar.layouts.layout import Layout
from meshpar.layouts.param import follows_load
from meshpar.once import Once

HOST_MEMORY = "pinned_host"
"""The kind of memory, as jax names it, that devices copy from and to by themselves."""

Spec = tuple[tuple[str, ...], ...]
"""Mesh axes per dim, in the order of the dims; () leaves a dim whole."""


def partition_spec(spec: Spec) -> PartitionSpec:
    """Turns axes per dim into a PartitionSpec."""
    return PartitionSpec(*(a[0] if len(a) == 1 else a or None for a in spec))


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """The plan of one tensor of the training state: its spec, dtype and bytes.

    Attributes:
      path: the parameter's path, or the optimizer leaf's key path.
      kind: "parameter", "frozen" (a parameter that is not trained), "state" (a variable
        that is no parameter), "weight", "gradient", "optimizer" or "synchronization".
      shape: logical shape.
      dtype: dtype.
      names: dim names, or None if the leaf has none.
      spec: mesh axes per dim.
      reason: the rule that decided each dim, and why another one did not.
      bytes_per_device: bytes of one device's shard.
      on_host: whether the shards live in host memory between their uses.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: Any
    names: tuple | None
    spec: Spec
    reason: str
    bytes_per_device: int
    on_host: bool = False

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """The sharding on a mesh, in the memory where the tensor lives.

        Raises:
          LayoutError: it lives in host memory, and the mesh's devices name none.
        """
        memory = HOST_MEMORY if self.on_host else None
        sharding = NamedSharding(mesh, self.partition_spec, memory_kind=memory)
        if self.on_host and sharding.memory_kind != HOST_MEMORY:
            raise LayoutError(
                f"{self.path} is to live in host memory, and these devices "
                f"({mesh.devices.flat[0].device_kind}) name none, as in topologies of "
                "GPUs: leave offload out to compile ahead of time"
            )
        return sharding

    @property
    def partition_spec(self) -> PartitionSpec:
        """The spec as a PartitionSpec."""
        return partition_spec(self.spec)

    @functools.cached_property
    def held(self) -> Spec:
        """The spec without the axes along which the tensor is gathered before use."""
        names = self.names or (None,) * len(self.spec)
        return tuple(
            tuple(axis for axis in axes if is_held(axis, name))
            for name, axes in zip(names, self.spec, strict=True)
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """A layout resolved for one model and optimizer.

    Attributes:
      layout: the layout.
      parameters: {path: LeafPlan} of all variables: the master weights, which the
        optimizer updates, frozen parameters and state; sharded over every axis at every
        ZeRO level.
      weights: {path: LeafPlan} of the copies that the loss computes with, in the
        compute dtype; whole over `fsdp` under zero=1 and 2, sharded under zero=3, which
        gathers one layer at a time.
      gradients: {path: LeafPlan} in the backward pass, in the dtype of the weights; of
        the trained parameters alone.
      optimizer: one LeafPlan per optimizer leaf, in tree order.
      optimizer_specs: PartitionSpecs with the structure of the optimizer state.
      synchronization: one LeafPlan per tensor that synchronizes replicas (local SGD).
    """

    layout: Layout
    parameters: dict[str, LeafPlan]
    weights: dict[str, LeafPlan]
    gradients: dict[str, LeafPlan]
    optimizer: tuple[LeafPlan, ...]
    optimizer_specs: Any
    synchronization: tuple[LeafPlan, ...] = ()

    @property
    def paths_on_host(self) -> frozenset[str]:
        """Paths of the parameters that live in host memory."""
        plans = self.parameters.items()
        return frozenset(path for path, leaf in plans if leaf.on_host)

    @property
    def specs(self) -> dict[str, PartitionSpec]:
        """{path: spec} of master weights, and of the gradients the optimizer gets."""
        return {path: leaf.partition_spec for path, leaf in self.parameters.items()}

    def trained(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The entries of {path: anything} that are trained."""
        return {path: x for path, x in tree.items() if path in self.gradients}

    def slopes(self, gradients: dict[str, Any]) -> dict[str, Any]:
        """The gradients {path: anything} that are slopes of the loss, and no loads."""
        return {
            path: x
            for path, x in gradients.items()
            if not follows_load(self.gradients[path].names)
        }

    def of_layout(self, layout: Layout) -> Self:
        """The plan of another layout that shards every leaf alike.

        What depends on the leaves alone is made once for both.
        """
        other = dataclasses.replace(self, layout=layout)
        vars(other)["of_leaves"] = self.of_leaves
        return other

    @functools.cached_property
    def of_leaves(self) -> Once:
        """Results that depend on the leaves, a mesh and their key alone."""
        return Once()

    def bytes_per_device(self) -> dict[str, int]:
        """{kind: bytes} on one device, exact.

        Parameters and optimizer state live from step to step, weights and gradients
        within a step. Under zero=3 the weights' shards are counted, without the layer
        that is gathered.
        """
        leaves = {
            "parameters": self.parameters.values(),
            "optimizer": self.optimizer,
            "weights": self.weights.values(),
            "gradients": self.gradients.values(),
            "synchronization": self.synchronization,
        }
        return self._bytes("bytes_per_device", leaves)

    def host_bytes(self) -> dict[str, int]:
        """{kind: bytes} of one device's shards that live in host memory, exact."""
        leaves = {"parameters": self.parameters.values(), "optimizer": self.optimizer}
        return self._bytes("host_bytes", leaves, lambda leaf: leaf.on_host)

    def _bytes(
        self,
        name: str,
        leaves: dict[str, Iterable[LeafPlan]],
        counts: Callable[[LeafPlan], bool] = lambda _: True,
    ) -> dict[str, int]:
        """{kind: bytes of one device's shards} of the leaves that count."""
        return self.of_leaves.of(
            name,
            lambda: {
                kind: sum(leaf.bytes_per_device for leaf in plans if counts(leaf))
                for kind, plans in leaves.items()
            },
        )

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
                f"{leaf.kind:9} {leaf.path}  {shape} {dtype_name(leaf)}  "
                f"[{where}]  {leaf.bytes_per_device} B/device  {leaf.reason}"
                f"{'  in host memory' if leaf.on_host else ''}"
            )
        totals = ", ".join(f"{k} {v}" for k, v in self.bytes_per_device().items())
        return "\n".join([*lines, f"bytes per device: {totals}"])
