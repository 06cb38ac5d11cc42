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

from meshpar.arrays import Array
from meshpar.contracts.purposes import purpose
from meshpar.layouts.axes import CONTEXT, ways_of
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
    """The spec by which automatic axes split x[..., B, L, N, H], or x[B, L].

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


def whole_segments(segments_BL: Array) -> Array:
    """Numbers of the documents of all tokens, one device after another: [B, M].

    Communication: an all_gather of the segments; layers may share it.

    Args:
      segments_BL: those of this device's tokens.
    """

    def gather(x: Array) -> Array:
        return lax.all_gather(x, CONTEXT, axis=1, tiled=True)

    spec = spec_of(segments_BL)
    with purpose("documents of whole sequences"):
        return on_devices(gather, spec, spec)(segments_BL)


def widened(x: Array) -> Array:
    """Casts to the dtype in which collectives of the platform move floats."""
    wide = traced_platform().widens_collectives
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if wide else x


def exchanged(
    x: Array,
    send: Callable[[Array], Array],
    send_back: Callable[[Array], Array],
    why: str,
) -> Array:
    """send(x) on the shards of each device; its gradient is sent back.

    Args:
      x: [..., B, L, N, H]; the result has these dims too.
      send: a linear function of a shard.
      send_back: its transpose.
      why: the purpose, for reports.
    """
    spec = spec_of(x)
    there, back = (on_devices(fn, spec, spec) for fn in (send, send_back))
    run = jax.custom_vjp(there)
    run.defvjp(lambda x: (there(x), None), lambda _, dy: (back(dy),))
    with purpose(why):
        return run(x)
