"""Causal attention over sequences that `context` splits, by `context_mode=`."""

from collections.abc import Callable

from meshpar.arrays import Array
from meshpar.errors import LayoutError
from meshpar.layouts import scope as scopes
from meshpar.layouts.axes import CONTEXT
from meshpar.layouts.context_modes import ALLGATHER, RING, ULYSSES
from meshpar.ops.attention_kernels import DIM_NAMES, by_platform
from meshpar.ops.context.gathered import gathered_attention
from meshpar.ops.context.ring import ring_attention
from meshpar.ops.context.ulysses import ulysses_attention
from meshpar.ops.kernels import on_shards
from meshpar.rows.opaque import split_as_arguments

MODES: dict[str, Callable[[Array, Array, Array], Array]] = {
    ALLGATHER: gathered_attention,
    ULYSSES: ulysses_attention,
    RING: ring_attention,
}
"""{value of context_mode=: attention of the tokens of one device}."""


def attention(q_BLNH: Array, k_BLKH: Array, v_BLKH: Array) -> Array:
    """Softmax attention of every position to itself and the positions before it.

    The arrays hold the tokens that the model sees, in the order of
    `context.positions`. Communication: none, unless `context` splits the length; then
    as in the function of the mode.

    Args:
      q_BLNH: queries, any float dtype.
      k_BLKH: keys; K divides N (grouped-query attention).
      v_BLKH: values.

    Returns:
      y_BLNH, in the dtype of the queries.

    Raises:
      LayoutError: a dim that does not divide over its axes.

    Source: Vaswani et al., arXiv:1706.03762, section 3.2.1; Ainslie et al., GQA,
      arXiv:2305.13245.
    """
    return split_as_arguments(_attention, q_BLNH, k_BLKH, v_BLKH)


def _attention(*qkv: Array) -> Array:
    scope = scopes.current_scope()
    if scope is None or scope.mesh.shape.get(CONTEXT, 1) == 1:
        return by_platform(*qkv)
    axes = scope.layout.activation_rules["length"]
    if axes != (CONTEXT,):
        raise LayoutError(
            f"activations.length={'+'.join(axes) or 'none'}: attention needs sequences "
            f"that {CONTEXT}={scope.layout.context} alone splits; leave the rule out"
        )
    mode = MODES[scope.layout.context_mode]
    if CONTEXT in scope.manual_axes:
        return mode(*qkv)

    def on_one_device(*qkv: Array) -> Array:
        with scopes.use(scope.layout, scope.mesh, scope.mesh.axis_names):
            return mode(*qkv)

    return on_shards(on_one_device, DIM_NAMES, *qkv)
