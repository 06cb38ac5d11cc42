"""Matmuls of weights in float8, by qwix.

Activations and weights are rounded to e4m3, which has more digits, and gradients to
e5m2, which reaches further. A scale maps the largest value to the largest of the dtype:
one for each token of activations, so that no token depends on others, and one for each
weight. Gradients of weights, which are sums over tokens, need one scale for all tokens
of a microbatch: devices agree on their largest value by one small all_reduce. So
layouts round alike. Products are added up in float32.

Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433, section 3.
"""

import functools
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.arrays import Array
from meshpar.contracts.purposes import purpose
from meshpar.errors import MeshparError
from meshpar.layouts.axes import TOKEN_AXES, in_use
from meshpar.layouts.scope import current_scope

_LARGEST = float(jnp.finfo(jnp.float8_e5m2).max)

_Saved = tuple[Any, Any]
"""Both operands of a matmul, quantized."""


def matmul(x: Array, w: Array, dims: int = 1) -> Array:
    """Contracts the last dims of x with the first of w, forward and backward in float8.

    Communication: backward one all_reduce of a number over the axes that split tokens.

    Args:
      x: activations, [B, L, ...].
      w: a weight of the same dtype.
      dims: number of dims that are contracted.

    Returns:
      y[B, L, ...], in the dtype of x.

    Raises:
      MeshparError: qwix is not installed.
    """
    _qwix()
    free, size = x.ndim - dims, math.prod(w.shape[:dims])
    y = _matmul(x.reshape(-1, size), w.reshape(size, -1), _token_axes())
    return y.reshape(*x.shape[:free], *w.shape[dims:])


def _qwix() -> Any:
    try:
        return importlib.import_module("qwix")
    except ImportError:
        raise MeshparError(
            'matmuls in float8 need qwix: pip install "meshpar[float8]"'
        ) from None


def _token_axes() -> tuple[str, ...]:
    """The manual axes that split the tokens; the compiler follows all others."""
    scope = current_scope()
    if scope is None:
        return ()
    return in_use((a for a in TOKEN_AXES if a in scope.manual_axes), scope.mesh.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x_RD: Array, w_DF: Array, axes: tuple[str, ...]) -> Array:
    return _forward(x_RD, w_DF, axes)[0]


def _forward(x_RD: Array, w_DF: Array, axes: tuple[str, ...]) -> tuple[Array, _Saved]:
    del axes
    x, w = _by_row(x_RD, jnp.float8_e4m3fn), _quantized(w_DF, jnp.float8_e4m3fn)
    return _dot(x, w, (1, 0), x_RD.dtype), (x, w)


def _backward(
    axes: tuple[str, ...], saved: _Saved, dy_RF: Array
) -> tuple[Array, Array]:
    x, w = saved
    dx_RD = _dot(_by_row(dy_RF, jnp.float8_e5m2), w, (1, 1), dy_RF.dtype)
    q_RF, scale = _of_all_tokens(dy_RF * x.scale, axes)
    dw_DF = _dot(x.qvalue, q_RF, (0, 0), jnp.float32) * scale
    return dx_RD, dw_DF.astype(dy_RF.dtype)


_matmul.defvjp(_forward, _backward)


def _of_all_tokens(scaled_RF: Array, axes: tuple[str, ...]) -> tuple[Array, Array]:
    """(gradients in float8, their one scale).

    Args:
      scaled_RF: gradients of the output, times the scales of x: these stand along the
        sum over tokens, and cannot be taken out of it.
      axes: that split the tokens.
    """
    largest = jnp.max(jnp.abs(scaled_RF))
    if axes:
        with purpose("largest gradients in float8"):
            largest = lax.pmax(largest, axes)
    scale = largest / _LARGEST
    q_RF = (scaled_RF / jnp.where(scale > 0, scale, 1)).astype(jnp.float8_e5m2)
    return q_RF, scale


def _quantized(x: Array, dtype: Any, **options: Any) -> Any:
    return _qwix().quantize(x, dtype, scale_dtype=jnp.float32, **options)


def _by_row(x_RD: Array, dtype: Any) -> Any:
    return _quantized(x_RD, dtype, channelwise_axes=(0,))


def _dot(x: Any, y: Any, dims: tuple[int, int], dtype: Any) -> Array:
    """Contracts one dim of x with one of y."""
    numbers = ((dims[:1], dims[1:]), ((), ()))
    dot = _qwix().dot_general(x, y, numbers, preferred_element_type=jnp.float32)
    return dot.astype(dtype)
