"""Moves: activations that models send between devices by collectives of their own."""

from typing import NamedTuple

from meshpar.layouts.remat import EXPERT_ROWS

EMBEDDING, HEAD = "embedding", "head"
"""Parts of a model outside its layers that move activations by hand."""


class Move(NamedTuple):
    """One collective of a model, forward unless `in_backward`.

    Attributes:
      kind: as `contracts.Collective.kind`.
      axes: mesh axes over which it runs, outer to inner.
      payload_bytes: bytes of the whole tensor on one device, over all `times`.
      why: purpose, for reports.
      has_gradient: whether the backward pass moves the gradient back.
      is_saved: whether the backward pass needs what it brought: rematerialization
        moves that again.
      bound: whether a compiler may share it between layers, or leave it out.
      optional: whether a compiler may leave it out, as the same has run before.
      times: how often it runs in one pass.
      in_backward: whether it runs in the backward pass alone, not in the forward pass.
      group_size: devices that take part together, if those are only parts of the
        devices along `axes`; 0 for all.
      when_repeated: whether it runs only where a policy of `remat` moves `saved_as`
        again.
      saved_as: name of what it brought, for policies of `remat`.
      into_sublayer: whether it moves activations into or out of a sublayer, which a
        compiler need not do then (`ops.tensor_parallel`).
      part: `EMBEDDING` or `HEAD` for moves outside the layers.
    """

    kind: str
    axes: tuple[str, ...]
    payload_bytes: int
    why: str
    has_gradient: bool = True
    is_saved: bool = True
    bound: bool = False
    optional: bool = False
    times: int = 1
    in_backward: bool = False
    group_size: int = 0
    when_repeated: bool = False
    saved_as: str = EXPERT_ROWS
    into_sublayer: bool = False
    part: str = ""
