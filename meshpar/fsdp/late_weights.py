"""Weights that the head alone reads: ZeRO gathers them late and reduces them early."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax import lax

from meshpar.arrays import Array, Params, num_bytes
from meshpar.collectives import transport
from meshpar.fsdp.gather_order import gather_beside
from meshpar.fsdp.sharding import ManualSharding
from meshpar.fsdp.zero import Zero


@dataclasses.dataclass(frozen=True)
class LateWeights:
    """Weights of the head that wait for the layers; maybe none.

    Large ones of ZeRO-3 are gathered after the layers. Where collectives mix with those
    of loops, all that the head alone reads are here, gathered before: as their
    gradients do not read the backward pass of the layers, it has to wait for them.

    Attributes:
      zero: the policy.
      leaves: their leaves.
    """

    zero: Zero
    leaves: Params

    @classmethod
    def of(
        cls,
        zero: Zero,
        shared: Params,
        read_by_head_alone: Callable[[], frozenset[str]],
    ) -> "LateWeights":
        """Chooses them.

        Args:
          zero: the policy.
          shared: leaves of embedding and head.
          read_by_head_alone: traces which of these weights nothing else reads.
        """
        paths = _candidates(zero, shared)
        if paths:
            paths = _in_own_buckets(zero, paths & read_by_head_alone(), shared)
        return cls(zero, {path: shared[path] for path in paths})

    def split(self, shared: Params, constants: Params) -> tuple[Params, Params]:
        """(leaves, constants) of embedding and head that are made whole first.

        The constants are whole weights if they were gathered before (ZeRO-2).
        """
        early = {path: x for path, x in shared.items() if path not in self.leaves}
        if self.zero.gathers_layers and self.zero.transports.mixes:
            constants = constants | lax.stop_gradient(self.leaves)
        return early, constants

    def before_head(self, x: Any, whole: Params) -> tuple[Any, Params]:
        """(activations after the layers, the whole weights).

        The backward pass of the layers waits until the gradients are reduced. They
        would be held whole until it is over.

        Args:
          x: activations after the layers.
          whole: weights that were made whole before the layers.
        """
        if not self.leaves:
            return x, {}
        zero, shardings = self.zero, self.zero.layered.split(self.zero.shardings)[0]
        ready = {path: whole[path] for path in self.leaves if path in whole}
        ready = lax.stop_gradient(ready)
        return gather_beside(
            lambda leaves: ready or zero.whole_shared(leaves, {}),
            zero.reduced_shared,
            shardings,
        )(x, self.leaves)


def _candidates(zero: Zero, shared: Params) -> frozenset[str]:
    """Paths that move alone in ZeRO-3; all, where collectives mix.

    There the compiler itself may gather the gradient of a whole weight over axes that
    stay automatic.
    """
    if zero.transports.mixes and zero.reduces_early:
        return frozenset(shared)

    def waits(path: str) -> bool:
        sharding = zero.shardings[path]
        if not (zero.gathers_layers and sharding.splits) or sharding.automatic_axes:
            return False
        return _moves_alone(sharding, shared[path])

    return frozenset(filter(waits, shared))


def _in_own_buckets(
    zero: Zero, paths: frozenset[str], shared: Params
) -> frozenset[str]:
    """Paths that share no bucket with others."""

    def bucket(path: str) -> tuple:
        sharding = zero.shardings[path]
        return sharding.axes, sharding.automatic_axes, shared[path].dtype

    split = {path: x for path, x in shared.items() if zero.shardings[path].splits}
    small = {p for p, x in split.items() if not _moves_alone(zero.shardings[p], x)}
    others = {bucket(path) for path in small - paths}
    return paths - {path for path in paths & small if bucket(path) in others}


def _moves_alone(sharding: ManualSharding, leaf: Array) -> bool:
    size = num_bytes(leaf) * lax.axis_size(sharding.axes)
    return sharding.alone or size >= transport.LARGE_BYTES
