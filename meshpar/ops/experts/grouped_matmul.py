"""Grouped matmul by platform: rows in groups, a matrix for each group.

TPUs have `lax.ragged_dot` natively. On CPUs and GPUs it computes every group with every
matrix; there a loop runs over the blocks of rows that are in use.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.arrays import Array, vary, vary_alike
from meshpar.collectives.varying import sum_varying
from meshpar.contracts.purposes import purpose
from meshpar.layouts.axes import in_use
from meshpar.layouts.plan import partition_spec
from meshpar.layouts.scope import activation_axes, current_scope
from meshpar.mesh.order import zero_after
from meshpar.mesh.platform import TPU, traced_platform

BLOCK = 64
"""Rows of a block; groups are padded to whole blocks."""


def grouped_matmul(
    x_SD: Array, w_EDF: Array, sizes_E: Array, split: tuple[str, ...] = ()
) -> Array:
    """Multiplies the rows of each group by the matrix of the group.

    x[S, D], w[E, D, F] -> y[S, F]. The groups stand one after the other; rows beyond
    the last one give zeros, whatever they hold. Communication: none, but for one
    all_reduce of y if D is split, and of the gradient of x if F is.

    Args:
      x_SD: rows; S is a multiple of `BLOCK`.
      w_EDF: a matrix for each group.
      sizes_E: int32 rows of each group, multiples of `BLOCK`.
      split: which automatic axes split D and F, as dim names: ("", "mlp") or
        ("mlp", ""); the compiler would sum over them inside the loop.

    Source: Gale et al., MegaBlocks, arXiv:2211.15841, section 5.1.
    """
    if traced_platform() is TPU:
        return by_ragged_dot(x_SD, w_EDF, sizes_E, split or ("", ""))
    if scope := current_scope():
        scope.looped_flops.append(2.0 * x_SD.size * w_EDF.shape[-1])
    return in_blocks(x_SD, w_EDF, sizes_E, split or ("", ""))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def by_ragged_dot(
    x_SD: Array, w_EDF: Array, sizes_E: Array, split: tuple[str, str] = ("", "")
) -> Array:
    """`grouped_matmul` by `lax.ragged_dot`, whose backward pass frees rows early."""
    _, dims, _ = _split_axes(split)

    def run(x_SD: Array, w_EDF: Array, sizes_E: Array) -> Array:
        return _summed(lax.ragged_dot(x_SD, w_EDF, sizes_E), dims)

    return _by_hand(run, "xws", "y", split)(x_SD, w_EDF, sizes_E)


def _ragged_forward(
    x_SD: Array, w_EDF: Array, sizes_E: Array, split: tuple[str, str]
) -> tuple[Array, tuple[Array, Array, Array]]:
    return by_ragged_dot(x_SD, w_EDF, sizes_E, split), (x_SD, w_EDF, sizes_E)


def _ragged_backward(
    split: tuple[str, str], saved: tuple[Array, Array, Array], dy_SF: Array
) -> tuple[Array, Array, None]:
    """Gradients of the weights first: schedulers put them last, and hold the rows."""
    _, _, features = _split_axes(split)

    def run(
        x_SD: Array, w_EDF: Array, sizes_E: Array, dy_SF: Array
    ) -> tuple[Array, Array]:
        _, of_weights = jax.vjp(lambda w: lax.ragged_dot(x_SD, w, sizes_E), w_EDF)
        (dw_EDF,) = of_weights(dy_SF)
        sizes_E += zero_after(dw_EDF).astype(sizes_E.dtype)
        _, of_rows = jax.vjp(lambda x: lax.ragged_dot(x, w_EDF, sizes_E), x_SD)
        return _summed(*of_rows(dy_SF), features), dw_EDF

    return *_by_hand(run, "xwsy", "xw", split)(*saved, dy_SF), None


by_ragged_dot.defvjp(_ragged_forward, _ragged_backward)


def _blocks(x_SD: Array, sizes_E: Array) -> tuple[Array, Array]:
    """(number of blocks in use, group of every block)."""
    ends_E = jnp.cumsum(sizes_E) // BLOCK
    numbers = jnp.arange(len(x_SD) // BLOCK)
    groups = jnp.sum(numbers[:, None] >= ends_E[None], axis=1)
    return ends_E[-1], jnp.minimum(groups, len(sizes_E) - 1)


def _block(x: Array, i: Array) -> Array:
    return lax.dynamic_slice_in_dim(x, i * BLOCK, BLOCK)


def _put_block(x: Array, block: Array, i: Array) -> Array:
    block = block.astype(x.dtype)
    return lax.dynamic_update_slice_in_dim(x, block, i * BLOCK, axis=0)


def _zeros(shape: tuple[int, ...], dtype: jnp.dtype, *like: Array) -> Array:
    """Zeros that vary over the manual axes of any of the other arrays."""
    axes = {a for x in like for a in jax.typeof(x).manual_axis_type.varying}
    return vary(jnp.zeros(shape, dtype), tuple(axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def in_blocks(
    x_SD: Array, w_EDF: Array, sizes_E: Array, split: tuple[str, str] = ("", "")
) -> Array:
    """`grouped_matmul` as a loop over the blocks in use."""

    def run(x_SD: Array, w_EDF: Array, sizes_E: Array) -> Array:
        num, groups = _blocks(x_SD, sizes_E)
        y_SF = _zeros((len(x_SD), w_EDF.shape[-1]), x_SD.dtype, x_SD, w_EDF, sizes_E)

        def body(i: Array, y_SF: Array) -> Array:
            w_DF = lax.dynamic_index_in_dim(w_EDF, groups[i], keepdims=False)
            return _put_block(y_SF, _block(x_SD, i) @ w_DF, i)

        return _summed(lax.fori_loop(0, num, body, y_SF), dims)

    axes, dims, features = _split_axes(split)
    if not axes:
        return run(x_SD, w_EDF, sizes_E)
    return jax.shard_map(
        run,
        in_specs=(_spec((), dims), _spec((), dims, features), _spec(())),
        out_specs=_spec((), features),
        axis_names=axes,
    )(x_SD, w_EDF, sizes_E)


def _forward(
    x_SD: Array, w_EDF: Array, sizes_E: Array, split: tuple[str, str]
) -> tuple[Array, tuple]:
    return in_blocks(x_SD, w_EDF, sizes_E, split), (x_SD, w_EDF, sizes_E)


def _backward(
    split: tuple[str, str], saved: tuple, dy_SF: Array
) -> tuple[Array, Array, None]:
    def run(
        x_SD: Array, w_EDF: Array, sizes_E: Array, dy_SF: Array
    ) -> tuple[Array, Array]:
        num, groups = _blocks(x_SD, sizes_E)
        like = x_SD, w_EDF, sizes_E, dy_SF
        zeros = (
            _zeros(x_SD.shape, x_SD.dtype, *like),
            _zeros(w_EDF.shape, jnp.float32, *like),
        )

        def body(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            dx_SD, dw_EDF = sums
            e, dy, x = groups[i], _block(dy_SF, i), _block(x_SD, i)
            w_DF = lax.dynamic_index_in_dim(w_EDF, e, keepdims=False)
            new = jnp.matmul(x.T, dy, preferred_element_type=jnp.float32)
            return _put_block(dx_SD, dy @ w_DF.T, i), dw_EDF.at[e].add(new)

        dx_SD, dw_EDF = lax.fori_loop(0, num, body, zeros)
        return _summed(dx_SD, features), dw_EDF.astype(w_EDF.dtype)

    axes, dims, features = _split_axes(split)
    if axes:
        x_spec, w_spec = _spec((), dims), _spec((), dims, features)
        run = jax.shard_map(
            run,
            in_specs=(x_spec, w_spec, _spec(()), _spec((), features)),
            out_specs=(x_spec, w_spec),
            axis_names=axes,
        )
    return *run(*saved, dy_SF), None


in_blocks.defvjp(_forward, _backward)


def batched_matmul(x_ESD: Array, w_EDF: Array, split: tuple[str, str]) -> Array:
    """x[E, S, D] w[E, D, F]: as many rows for every matrix.

    Args:
      x_ESD: rows of each group.
      w_EDF: the matrix of each group.
      split: as in `grouped_matmul`.
    """
    if not _split_axes(split)[0]:
        return jnp.einsum("ESD,EDF->ESF", x_ESD, w_EDF)
    return _batched(*vary_alike(x_ESD, w_EDF), split)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _batched(x_ESD: Array, w_EDF: Array, split: tuple[str, str]) -> Array:
    _, dims, _ = _split_axes(split)

    def run(x_ESD: Array, w_EDF: Array) -> Array:
        return _summed(jnp.einsum("ESD,EDF->ESF", x_ESD, w_EDF), dims)

    return _by_hand(run, "xw", "y", split)(x_ESD, w_EDF)


def _batched_forward(
    x_ESD: Array, w_EDF: Array, split: tuple[str, str]
) -> tuple[Array, tuple[Array, Array]]:
    return _batched(x_ESD, w_EDF, split), (x_ESD, w_EDF)


def _batched_backward(
    split: tuple[str, str], saved: tuple[Array, Array], dy_ESF: Array
) -> tuple[Array, Array]:
    _, _, features = _split_axes(split)

    def run(x_ESD: Array, w_EDF: Array, dy_ESF: Array) -> tuple[Array, Array]:
        dx_ESD = jnp.einsum("ESF,EDF->ESD", dy_ESF, w_EDF)
        dw_EDF = jnp.einsum("ESD,ESF->EDF", x_ESD, dy_ESF)
        return _summed(dx_ESD, features), dw_EDF

    return _by_hand(run, "xwy", "xw", split)(*saved, dy_ESF)


_batched.defvjp(_batched_forward, _batched_backward)


def _by_hand(
    fn: Callable, given: str, results: str, split: tuple[str, str]
) -> Callable:
    """A part of a matmul on the shards of each device.

    Args:
      fn: a function of arrays.
      given: what they are: "x" rows [..., D], "w" matrices, "y" rows [..., F], "s" none
        of these.
      results: what it returns, in these letters.
      split: as in `grouped_matmul`.
    """
    axes, dims, features = _split_axes(split)
    if not axes:
        return fn

    def spec(letter: str, lead: int) -> PartitionSpec:
        rows = ((),) * lead
        entries = {
            "x": (*rows, dims),
            "w": ((), dims, features),
            "y": (*rows, features),
            "s": (),
        }
        return partition_spec(entries[letter])

    def run(*args: Array) -> Any:
        args, lead = vary_alike(*args), args[0].ndim - 1
        outs = tuple(spec(letter, lead) for letter in results)
        mapped = jax.shard_map(
            fn,
            in_specs=tuple(spec(letter, lead) for letter in given),
            out_specs=outs if len(outs) > 1 else outs[0],
            axis_names=axes,
            check_vma=False,
        )
        varying = tuple(jax.typeof(args[0]).manual_axis_type.varying)
        return jax.tree.map(lambda x: vary(x, varying), mapped(*args))

    return run


def _split_axes(
    split: tuple[str, str],
) -> tuple[set[str], tuple[str, ...], tuple[str, ...]]:
    """(automatic axes, those that split D, those that split F) inside shard_map."""
    scope = current_scope()
    if scope is None or not scope.manual_axes:
        return set(), (), ()
    axes = set(scope.mesh.axis_names) - scope.manual_axes
    if not in_use(axes, scope.mesh.shape):
        return set(), (), ()
    names = [name or None for name in split]
    return axes, *activation_axes(scope, names, "experts.grouped_matmul")


def _spec(*dims: tuple[str, ...]) -> PartitionSpec:
    return partition_spec(dims)


def _summed(x: Array, axes: tuple[str, ...]) -> Array:
    """Sums x over the axes that split the contracted dim."""
    with purpose("rows of experts, summed over their mlp dim"):
        for axis in axes:
            x = sum_varying(x, axis)
    return x
