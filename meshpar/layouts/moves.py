"""Moves: activations that a layer sends between devices by collectives of its own."""

from typing import NamedTuple


class Move(NamedTuple):
    """One collective of a layer's forward pass.

    Attributes:
      kind: as `contracts.Collective.kind`.
      axes: mesh axes over which it runs, outer to inner.
      payload_bytes: bytes of the whole tensor on one device.
      why: purpose, for reports.
      has_gradient: whether the backward pass moves the gradient back.
      is_saved: whether the backward pass needs what it brought: rematerialization
        moves that again.
      bound: whether a compiler may leave it out.
    """

    kind: str
    axes: tuple[str, ...]
    payload_bytes: int
    why: str
    has_gradient: bool = True
    is_saved: bool = True
    bound: bool = False
