"""Portable states: layers in the order of the model, the same under all layouts.

A pipeline may store its layers in another order, and with padding. Checkpoints and
comparisons use the model's order.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax

from meshpar.lowering.state import TrainState


class StoredOrder(Protocol):
    """Turns trees of parameters from the stored order to the model's, and back."""

    def in_model_order(self, tree: Any) -> Any:
        """Leaves [depth, ...] from leaves as stored."""

    def as_stored(self, tree: Any) -> Any:
        """Leaves as stored from leaves [depth, ...]."""

    def abstract_in_model_order(self, tree: Any) -> Any:
        """`in_model_order` of ShapeDtypeStructs with shardings."""


@dataclasses.dataclass(frozen=True)
class PortableState:
    """Turns training states between the stored order and the model's.

    Attributes:
      abstract: the state as stored: ShapeDtypeStructs with shardings.
      order: how the layers are stored; None for the model's own order.
    """

    abstract: TrainState
    order: StoredOrder | None

    @property
    def abstract_portable(self) -> TrainState:
        """The state in the model's order: ShapeDtypeStructs with shardings."""
        if self.order is None:
            return self.abstract
        return self.order.abstract_in_model_order(self.abstract)

    def in_model_order(self, state: TrainState) -> TrainState:
        """The state with layers in the order of the model."""
        if self.order is None:
            return state
        return _jitted(self.order.in_model_order, self.abstract_portable)(state)

    def as_stored(self, state: TrainState) -> TrainState:
        """The inverse of `in_model_order`."""
        if self.order is None:
            return state
        return _jitted(self.order.as_stored, self.abstract)(state)


def _jitted(fn: Callable, like: TrainState) -> Callable:
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.jit(fn, out_shardings=shardings)
