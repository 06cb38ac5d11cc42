"""Megatron's column- and row-parallel matmuls, with collectives written by hand.

Between blocks `tensor` splits the length of sequences. A column-parallel matmul gathers
it, a row-parallel matmul adds up and scatters it. On TPUs both go around a ring, whose
steps stand beside the matmuls of their parts; elsewhere they are one collective.

Under the jit lowering, unless `tensor` is the only axis, and for weights that the axis
does not split, such as those of fewer kv heads than devices, collectives are left to
the compiler.

Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3; Korthikanti et al.,
  arXiv:2205.05198, section 4.2.2 (sequence parallelism).
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, vary_alike
from meshpar.collectives.collective_matmul import contract, weight_gradient
from meshpar.contracts.purposes import purpose
from meshpar.layouts.remat import MATMUL
from meshpar.layouts.scope import activation_axes, constrain, current_scope
from meshpar.mesh.platform import traced_platform
from meshpar.ops.tensor_split import INTO, OUT, MatmulSplit

Named = tuple[Array, Sequence[str]]
"""A weight, and the names of its dims."""

Matmul = Callable[[Array, Array, int], Array]
"""(x, w, dims) -> x with its last dims contracted with the first of w."""


def column_parallel(
    x_BLD: Array, *weights: Named, matmul: Matmul | None = None
) -> tuple[Array, ...]:
    """Multiplies x[B, L, D] by weights w[D, F...] whose first dim of F devices split.

    x comes as it is between blocks, with its length split, and is saved so.
    Communication: one all_gather of x for all weights; backward one all_gather and one
    reduce_scatter.

    Args:
      x_BLD: activations.
      *weights: (w, the names of its dims), such as ("embed", "heads", "head_dim").
      matmul: in place of that of jax; its collectives are left to the compiler.

    Returns:
      y[B, L, F...] for every weight, with the whole length.
    """
    splits = [
        None if matmul else MatmulSplit.of(x_BLD, embed, features, w.shape[1])
        for w, (embed, *features) in weights
    ]
    split = next((split for split in splits if split is not None), None)
    if split is None:
        x_BLD = constrain(x_BLD, "batch", "length", weights[0][1][0])
        return tuple(_matmul(x_BLD, w, 1, matmul) for w, _ in weights)
    by_hand = [w for own, (w, _) in zip(splits, weights, strict=True) if own]
    x, *arrays = _alike(x_BLD, *by_hand)
    with purpose(INTO):
        ys = iter(_columns(split, x, tuple(arrays)))
    results = []
    for own, (w, _) in zip(splits, weights, strict=True):
        # Without a split as on one device: each device multiplies its own tokens.
        y = checkpoint_name(next(ys), MATMUL) if own else jnp.tensordot(x_BLD, w, 1)
        results.append(y)
    return tuple(results)


def row_parallel(
    y_BLF: Array, w_FD: Array, names: Sequence[str], matmul: Matmul | None = None
) -> Array:
    """Multiplies y[B, L, F...] by w[F..., D], whose first dim devices split.

    The result is as it is between blocks, with its length split. Communication: one
    reduce_scatter of the result; backward one all_gather.

    Args:
      y_BLF: activations with the whole length.
      w_FD: the weight.
      names: of its dims, such as ("heads", "head_dim", "embed").
      matmul: in place of that of jax; its collectives are left to the compiler.
    """
    split = None if matmul else MatmulSplit.of(y_BLF, names[-1], names[:-1], len(w_FD))
    if split is None:
        return _matmul(y_BLF, w_FD, w_FD.ndim - 1, matmul)
    y_BLF, w_FD = _alike(y_BLF, w_FD)
    with purpose(OUT):
        y_BLD = _row(split, y_BLF, w_FD)
    return checkpoint_name(y_BLD, MATMUL)


def _matmul(x: Array, w: Array, dims: int, matmul: Matmul | None) -> Array:
    """The matmul of x[B, L, ...], with collectives by the compiler."""
    if matmul:
        return checkpoint_name(matmul(*_alike(x, w), dims), MATMUL)
    scope = current_scope()
    split = scope is not None and activation_axes(scope, ("length",), "matmul")[0]
    if split or not traced_platform().multiplies_matrices:
        return jnp.tensordot(x, w, dims)
    return checkpoint_name(_flat(*_alike(x, w), dims), MATMUL)


def _alike(*arrays: Array) -> tuple[Array, ...]:
    """Arrays of one dtype that vary over the same axes, as operands of matmuls do."""
    dtype = jnp.result_type(*arrays)
    return vary_alike(*(jnp.asarray(x, dtype) for x in arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _flat(x: Array, w: Array, dims: int) -> Array:
    """`contract`, which saves its operands as they are for the backward pass."""
    return contract(x, w, dims)


def _flat_forward(x: Array, w: Array, dims: int) -> tuple[Array, tuple[Array, Array]]:
    return contract(x, w, dims), (x, w)


def _flat_backward(
    dims: int, saved: tuple[Array, Array], dy: Array
) -> tuple[Array, Array]:
    x, w = saved
    features = w.ndim - dims
    order = *range(dims, w.ndim), *range(dims)
    return contract(dy, w.transpose(order), features), weight_gradient(x, dy)


_flat.defvjp(_flat_forward, _flat_backward)


def _specs(split: MatmulSplit) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
    """Specs of arrays whose first, second or third dim devices split."""
    axis = split.axis
    return (
        PartitionSpec(axis),
        PartitionSpec(None, axis),
        PartitionSpec(None, None, axis),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _columns(split: MatmulSplit, x_BLD: Array, weights: Sequence[Array]) -> list[Array]:
    _, second, third = _specs(split)

    def gathered(x_BKD: Array, weights: Sequence[Array]) -> list[Array]:
        return split.gathered(x_BKD, weights)[0]

    in_specs = second, (second,) * len(weights)
    return split.mapped(gathered, in_specs, [third] * len(weights))(x_BLD, weights)


def _columns_forward(
    split: MatmulSplit, x_BLD: Array, weights: Sequence[Array]
) -> tuple[list[Array], tuple]:
    return _columns(split, x_BLD, weights), (x_BLD, weights)


def _columns_backward(
    split: MatmulSplit, saved: tuple, dys: list[Array]
) -> tuple[Array, tuple[Array, ...]]:
    x_BLD, weights = saved
    _, second, third = _specs(split)

    def backward(
        x_BKD: Array, weights: Sequence[Array], dys: list[Array]
    ) -> tuple[Array, list[Array]]:
        dx = split.scattered(dys, [jnp.moveaxis(w, 0, -1) for w in weights])
        # Without `after` a compiler would make one ring of this and of the forward's,
        # and hold the whole from there on.
        with purpose(f"{INTO}, for the gradients of weights", ""):
            parts = split.parts(x_BKD, after=dys[0])
        return dx, [split.weight_gradient(parts, dy, first=True) for dy in dys]

    in_specs = second, (second,) * len(dys), [third] * len(dys)
    run = split.mapped(backward, in_specs, (second, [second] * len(dys)))
    dx_BLD, dweights = run(x_BLD, weights, dys)
    return dx_BLD, tuple(dweights)


_columns.defvjp(_columns_forward, _columns_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _row(split: MatmulSplit, y_BLF: Array, w_FD: Array) -> Array:
    first, second, third = _specs(split)

    def scattered(y_BLF: Array, w_FD: Array) -> Array:
        return split.scattered([y_BLF], [w_FD])

    return split.mapped(scattered, (third, first), second)(y_BLF, w_FD)


def _row_forward(split: MatmulSplit, y_BLF: Array, w_FD: Array) -> tuple[Array, tuple]:
    return _row(split, y_BLF, w_FD), (y_BLF, w_FD)


def _row_backward(
    split: MatmulSplit, saved: tuple, dx_BLD: Array
) -> tuple[Array, Array]:
    y_BLF, w_FD = saved
    first, second, third = _specs(split)

    def gathered(dx_BKD: Array, y_BLF: Array, w_FD: Array) -> tuple[Array, Array]:
        (dy,), parts = split.gathered(dx_BKD, [jnp.moveaxis(w_FD, -1, 0)])
        return dy, split.weight_gradient(parts, y_BLF, first=False)

    run = split.mapped(gathered, (second, third, first), (third, first))
    return run(dx_BLD, y_BLF, w_FD)


_row.defvjp(_row_forward, _row_backward)
