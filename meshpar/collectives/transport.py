"""Transports: ways to move tensors, each beside the collectives that it declares.

A transport gathers and reduce-scatters along mesh axes inside shard_map, and says which
collectives a compiled program will show for it. `transports_for` chooses the transports
of a mesh once, from the facts about its platform and chips.
"""

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from meshpar.arrays import Array, num_bytes
from meshpar.collectives.rings import (
    PartOfSum,
    torus_all_gather,
    torus_reduce_scatter,
    torus_reduce_scatter_of,
)
from meshpar.contracts.purposes import gathers
from meshpar.mesh.chips import chip_of
from meshpar.mesh.order import computed
from meshpar.mesh.platform import platform_of, traced_platform
from meshpar.mesh.torus import ring_shape

LARGE_BYTES = 2**20
"""Tensors of this size or more, when whole, are worth the steps of a ring."""


class Movement(NamedTuple):
    """The collectives of a compiled program that move one tensor.

    Attributes:
      kind: as `contracts.Collective.kind`.
      count: how many there are.
      payload_bytes: bytes of whole tensors on one device, over all of them.
      note: how the tensor travels; "" for one collective.
    """

    kind: str
    count: int
    payload_bytes: int
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Transport:
    """Moves a tensor by one collective of the compiler's; the base of all others.

    Attributes:
      by_parts: whether `reduce_scatter_of` needs the parts of an addend one by one.
    """

    by_parts: ClassVar[bool] = False

    def covers(self, axes: tuple[str, ...]) -> bool:
        """Whether the transport implements collectives over these axes itself."""
        del axes
        return False

    def for_gathers(self, whole_bytes: int) -> "Transport":
        """The transport of an all_gather whose result has `whole_bytes`."""
        del whole_bytes
        return self

    def all_gather(self, x: Array, axes: tuple[str, ...], dim: int) -> Array:
        """Joins the shards of all devices along `dim`; call inside shard_map.

        Args:
          x: this device's shard.
          axes: mesh axes that hold the shards.
          dim: the dim that they split.
        """
        if dim and traced_platform().turns_stacks:
            # A flat array has one order in memory, whatever comes before and after it.
            x = computed(x.reshape(-1)).reshape(x.shape)
        return lax.all_gather(x, axes, axis=dim, tiled=True)

    def reduce_scatter(self, x: Array, axes: tuple[str, ...], dim: int = 0) -> Array:
        """Sums over the axes, and keeps this device's part of a dim.

        Args:
          x: this device's addend.
          axes: mesh axes of n devices.
          dim: the dim that they split; n divides it.
        """
        if _is_padded(x, dim):
            return _in_halves(x, axes, dim)
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)

    def reduce_scatter_of(self, part: PartOfSum, axis: str, dim: int = 0) -> Array:
        """`reduce_scatter` of an addend that is made part by part.

        Args:
          part: makes the parts along `dim`.
          axis: mesh axis of n devices.
          dim: the dim that they split; n divides it.
        """
        return self.reduce_scatter(part(0, 1, None), (axis,), dim)

    def declare(
        self, kind: str, axes: tuple[str, ...], ways: int, whole_bytes: int
    ) -> Movement:
        """The collectives that move one tensor.

        Args:
          kind: "all_gather" or "reduce_scatter".
          axes: mesh axes over which it moves.
          ways: devices that take part.
          whole_bytes: bytes of the whole tensor.
        """
        del axes, ways
        return Movement(kind, 1, whole_bytes)


ONE_SHOT = Transport()


def _is_padded(x: Array, dim: int) -> bool:
    """Whether the compiler would pad a sum of tokens [1, L, D] that is scattered.

    Gradients of weights, whose dim 0 may be scattered, go around rings on TPUs.
    """
    is_first = 0 < dim < x.ndim - 1 and math.prod(x.shape[:dim]) == 1
    is_large = 0 < traced_platform().pads_scattered_bytes <= num_bytes(x)
    return is_first and is_large and x.shape[-1] % 2 == 0


def _in_halves(x: Array, axes: tuple[str, ...], dim: int) -> Array:
    """`psum_scatter`, with two halves of the last dim before all others."""
    halves = jnp.stack(jnp.split(x, 2, axis=-1))
    halves = lax.psum_scatter(halves, axes, scatter_dimension=dim + 1, tiled=True)
    return jnp.concatenate(list(halves), axis=-1)


@dataclasses.dataclass(frozen=True)
class Rings(Transport):
    """Moves tensors around the rings of a torus, one permute a step.

    Attributes:
      shapes: {axis: the torus whose rings make up the axis}; other axes take one
        collective.
      loop: whether the steps of a reduce_scatter are a loop, which compiles faster but
        cannot overlap with compute.
    """

    by_parts: ClassVar[bool] = True

    shapes: Mapping[str, tuple[int, ...]]
    loop: bool = False

    def __hash__(self) -> int:
        return hash((tuple(self.shapes.items()), self.loop))

    def covers(self, axes: tuple[str, ...]) -> bool:
        """Whether the axes are one axis with rings."""
        return len(axes) == 1 and axes[0] in self.shapes

    def for_gathers(self, whole_bytes: int) -> Transport:
        """Rings for large tensors: a small one has too many steps for its bytes."""
        return self if whole_bytes >= LARGE_BYTES else ONE_SHOT

    def all_gather(
        self, x: Array, axes: tuple[str, ...], dim: int, folded: bool = False
    ) -> Array:
        """Joins the shards of all devices along `dim`, step by step.

        Args:
          x: this device's shard.
          axes: mesh axes that hold the shards.
          dim: the dim that they split.
          folded: as in `torus_all_gather`; where `covers(axes)` alone.
        """
        if not self.covers(axes):
            return super().all_gather(x, axes, dim)
        with gathers():
            return torus_all_gather(x, axes[0], self.shapes[axes[0]], dim, folded)

    def reduce_scatter(
        self, x: Array, axes: tuple[str, ...], dim: int = 0, folded: bool = False
    ) -> Array:
        """Sums over the axes step by step, and keeps this device's part of a dim.

        Args:
          x: this device's addend.
          axes: mesh axes of n devices.
          dim: the dim that they split; n divides it.
          folded: as in `torus_reduce_scatter`; where `covers(axes)` alone.
        """
        if not self.covers(axes):
            return super().reduce_scatter(x, axes, dim)
        shape = self.shapes[axes[0]]
        return torus_reduce_scatter(x, axes[0], shape, dim, self.loop, folded)

    def reduce_scatter_of(self, part: PartOfSum, axis: str, dim: int = 0) -> Array:
        """`reduce_scatter` of an addend whose parts are made where they are added."""
        if not self.covers((axis,)):
            return super().reduce_scatter_of(part, axis, dim)
        return torus_reduce_scatter_of(part, axis, self.shapes[axis], dim)

    def declare(
        self, kind: str, axes: tuple[str, ...], ways: int, whole_bytes: int
    ) -> Movement:
        """One permute per step of each ring; all steps together move (n-1)/n."""
        if not self.covers(axes):
            return super().declare(kind, axes, ways, whole_bytes)
        shape = self.shapes[axes[0]]
        steps = sum(shape) - len(shape)
        moved = whole_bytes // ways * (ways - 1)
        return Movement("permute", steps, moved, "around rings")


@dataclasses.dataclass(frozen=True)
class Transports:
    """The transports of one mesh, by the tensors that they move.

    Attributes:
      weights: a layer's weights, gathered where the layer runs.
      prefetched: weights gathered one layer ahead, beside a whole layer's compute.
      gradients: a layer's gradients, reduce-scattered beside the backward pass.
      once: gradients outside the layers, or once per step, which no compute hides.
      widens: whether floats smaller than 32 bits travel as float32.
      mixes: as `Platform.mixes_collectives`.
    """

    weights: Transport = ONE_SHOT
    prefetched: Transport = ONE_SHOT
    gradients: Transport = ONE_SHOT
    once: Transport = ONE_SHOT
    widens: bool = False
    mixes: bool = False

    def wire_dtype(self, dtype: Any) -> Any:
        """The dtype in which tensors of a compute dtype travel."""
        wider = self.widens and jnp.issubdtype(dtype, jnp.floating)
        return jnp.promote_types(dtype, jnp.float32) if wider else dtype


def transport_alone(mesh: Mesh, axes: tuple[str, ...]) -> Transport:
    """The transport of tensors whose moves no compute hides.

    One collective, except where TPUs run a reduce_scatter as an all_reduce, which sends
    twice the bytes: among all devices of the mesh, if they are a torus of three dims,
    or 16 and more (seen with libtpu 0.0.50).

    Args:
      mesh: the device mesh.
      axes: the axes over which tensors move.
    """
    once = transports_for(mesh, axes).once
    if not once.covers(axes) or mesh.shape[axes[0]] < mesh.size:
        return ONE_SHOT
    is_solid = len(ring_shape(mesh, axes[0])) == 3
    return once if is_solid or mesh.size >= 16 else ONE_SHOT


def transports_for(mesh: Mesh, axes: tuple[str, ...]) -> Transports:
    """Chooses the transports of a mesh.

    TPUs run a reduce_scatter alone, or as an all_reduce (16 chips and more, seen with
    libtpu 0.0.51), and most of them an all_gather too; the steps of a ring hide behind
    compute. A prefetched weight has a whole layer to hide behind, but one matmul hides
    only one all_gather. Outside the layers nothing hides a gather: one collective.

    Args:
      mesh: the device mesh.
      axes: the axes over which weights and gradients move.
    """
    platform = platform_of(mesh)
    widens, mixes = platform.widens_collectives, platform.mixes_collectives
    if not platform.hides_ring_steps:
        return Transports(widens=widens, mixes=mixes)
    shapes = {axis: ring_shape(mesh, axis) for axis in axes}
    rings = Rings(types.MappingProxyType(shapes))
    chip = chip_of(mesh.devices.flat[0].device_kind)
    gathers_hidden = chip is not None and chip.gathers_beside_compute
    return Transports(
        weights=ONE_SHOT if gathers_hidden else rings,
        prefetched=rings,
        gradients=rings,
        once=dataclasses.replace(rings, loop=True),
        widens=widens,
        mixes=mixes,
    )
