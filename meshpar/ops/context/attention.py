"""Causal attention over sequences that `context` splits, by `context_mode=`."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from meshpar.arrays import Array
from meshpar.errors import LayoutError, MeshparError
from meshpar.layouts import scope as scopes
from meshpar.layouts.axes import CONTEXT
from meshpar.layouts.context_modes import ALLGATHER, RING, ULYSSES
from meshpar.layouts.token_order import CONTIGUOUS
from meshpar.ops.attention_kernels import DIM_NAMES, SEGMENT_NAMES, by_platform
from meshpar.ops.context.exchange import head_ways
from meshpar.ops.context.gathered import gathered_attention
from meshpar.ops.context.ring import ring_attention
from meshpar.ops.context.ulysses import ulysses_attention
from meshpar.ops.kernels import on_shards
from meshpar.rows.opaque import split_as_arguments

MODES: dict[str, Callable[..., Array]] = {
    ALLGATHER: gathered_attention,
    ULYSSES: ulysses_attention,
    RING: ring_attention,
}
"""{value of context_mode=: attention of the tokens of one device}."""


def attention(
    q_BLNH: Array,
    k_BLKH: Array,
    v_BLKH: Array,
    *,
    window: int = 0,
    segments_BL: Array | None = None,
) -> Array:
    """Softmax attention of every position to itself and the positions before it.

    The arrays hold the tokens that the model sees, in the order of
    `context.positions`. Communication: none, unless `context` splits the length; then
    as in the function of the mode.

    Args:
      q_BLNH: queries, any float dtype.
      k_BLKH: keys; K divides N (grouped-query attention).
      v_BLKH: values.
      window: positions that each position sees, itself among them; 0 for all.
      segments_BL: number of the document of each token, integer; tokens see those of
        their own document alone. None for one document.

    Returns:
      y_BLNH, in the dtype of the queries.

    Raises:
      LayoutError: a dim that does not divide over its axes.
      MeshparError: a window below 0.

    Source: Vaswani et al., arXiv:1706.03762, section 3.2.1; Ainslie et al., GQA,
      arXiv:2305.13245; Beltagy et al., Longformer, arXiv:2004.05150, section 3.1
      (window); Krell et al., arXiv:2107.02027, section 3.2 (documents in one sequence).
    """
    if window < 0:
        raise MeshparError(f"window={window}: use 1 or more, or 0 for whole sequences")
    run = functools.partial(_attention, window=window)
    arrays = q_BLNH, k_BLKH, v_BLKH
    if segments_BL is not None:
        arrays += (segments_BL,)
    return split_as_arguments(run, *arrays)


def _attention(
    q: Array, k: Array, v: Array, segments_BL: Array | None = None, window: int = 0
) -> Array:
    scope = scopes.current_scope()
    if scope is not None:
        scope.heads_used.add(k.shape[2])
    if scope is not None and q.shape[2] % (ways := head_ways(scope)) == 0:
        k, v = (_heads_for(ways, x) for x in (k, v))
    qkv = q, k, v
    if scope is None or scope.mesh.shape.get(CONTEXT, 1) == 1:
        return by_platform(*qkv, segments_BL, window)
    axes = scope.layout.activation_rules["length"]
    if axes != (CONTEXT,):
        raise LayoutError(
            f"activations.length={'+'.join(axes) or 'none'}: attention needs sequences "
            f"that {CONTEXT}={scope.layout.context} alone splits; leave the rule out"
        )
    mode = MODES[scope.layout.context_mode]
    if CONTEXT in scope.manual_axes:
        return mode(*qkv, segments_BL, window)
    # Models of the jit lowering see whole sequences, in their own order.
    layout = dataclasses.replace(scope.layout, context_order=CONTIGUOUS)

    def on_one_device(q: Array, k: Array, v: Array, segments: Any = None) -> Array:
        with scopes.use(layout, scope.mesh, scope.mesh.axis_names):
            return mode(q, k, v, segments, window)

    others = [] if segments_BL is None else [(segments_BL, SEGMENT_NAMES)]
    return on_shards(on_one_device, DIM_NAMES, *qkv, others=others)


def _heads_for(ways: int, x_BLKH: Array) -> Array:
    """Keys or values with as many copies of each head as divide over some devices.

    A device then holds the heads that its queries read.
    """
    copies = math.lcm(x_BLKH.shape[2], ways) // x_BLKH.shape[2]
    return x_BLKH if copies == 1 else jnp.repeat(x_BLKH, copies, axis=2)
