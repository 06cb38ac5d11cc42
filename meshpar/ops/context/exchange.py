"""Collectives over `context`, each with a gradient that is one collective as well.

All other axes of the mesh are made manual around them: a compiler would make arrays
whole over those first.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, num_bytes
from meshpar.layouts.axes import CONTEXT, ways_of
from meshpar.layouts.moves import Move
from meshpar.layouts.scope import Scope, activation_spec, current_scope
from meshpar.mesh.platform import traced_platform
from meshpar.ops.attention_kernels import DIM_NAMES


def scope_in_use() -> Scope:
    """The layout in use; `context` is manual in it."""
    scope = current_scope()
    assert scope is not None and CONTEXT in scope.manual_axes
    return scope


def num_ranks() -> int:
    """Devices that share a sequence."""
    return scope_in_use().mesh.shape[CONTEXT]


def spec_of(x: Array) -> PartitionSpec:
    """How automatic axes split x[..., B, L, N, H], or x[B, L].

    Raises:
      LayoutError: a dim that does not divide over its axes.
    """
    names = (None,) * (x.ndim - len(DIM_NAMES)) + DIM_NAMES[: x.ndim]
    return activation_spec(scope_in_use(), x.shape, names)


def head_ways(scope: Scope) -> int:
    """Devices over which automatic axes split the heads."""
    axes = scope.layout.activation_rules["heads"]
    free = (a for a in axes if a in scope.mesh.shape and a not in scope.manual_axes)
    return ways_of(free, scope.mesh.shape)


def on_devices(fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable:
    """Makes the automatic axes manual, too: fn on the shards of each device."""
    scope = scope_in_use()
    axes = set(scope.mesh.axis_names) - scope.manual_axes
    if not axes:
        return fn
    return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, axis_names=axes)


def record(kind: str, size: int, why: str, **facts: int | bool) -> None:
    """Notes a collective of the layer.

    Args:
      kind: as in `Move`.
      size: bytes that it moves, as in `Move`.
      why: as in `Move`.
      **facts: other fields of `Move`.
    """
    moves = scope_in_use().moves
    moves.append(Move(kind, (CONTEXT,), size, why, saved_as="", **facts))


def bytes_on_device(x: Array) -> int:
    """Bytes of one device's part of an array that is whole over the automatic axes."""
    axes = [a for dim in spec_of(x) if dim for a in _axes(dim)]
    return num_bytes(x) // ways_of(axes, scope_in_use().mesh.shape)


def whole_segments(segments_BL: Array) -> Array:
    """Numbers of the documents of all tokens, one device after another: [B, M].

    Communication: an all_gather of the segments; layers may share it.

    Args:
      segments_BL: those of this device's tokens.
    """
    why = "documents of whole sequences"
    size = num_ranks() * bytes_on_device(segments_BL)
    record("all_gather", size, why, has_gradient=False, bound=True)

    def gather(x: Array) -> Array:
        return lax.all_gather(x, CONTEXT, axis=1, tiled=True)

    spec = spec_of(segments_BL)
    return on_devices(gather, spec, spec)(segments_BL)


def _axes(dim: str | tuple[str, ...]) -> tuple[str, ...]:
    return (dim,) if isinstance(dim, str) else dim


def widened(x: Array) -> Array:
    """Casts to the dtype in which collectives of the platform move floats."""
    wide = traced_platform().widens_collectives
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if wide else x


def exchanged(
    x: Array, send: Callable[[Array], Array], send_back: Callable[[Array], Array]
) -> Array:
    """send(x) on the shards of each device; its gradient is sent back.

    Args:
      x: [..., B, L, N, H]; the result has these dims too.
      send: a linear function of a shard.
      send_back: its transpose.
    """
    spec = spec_of(x)
    there, back = (on_devices(fn, spec, spec) for fn in (send, send_back))
    run = jax.custom_vjp(there)
    run.defvjp(lambda x: (there(x), None), lambda _, dy: (back(dy),))
    return run(x)
