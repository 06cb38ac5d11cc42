"""Matmuls of weights in float8, by qwix.

Activations and weights are rounded to e4m3, which has more digits, and gradients to
e5m2, which reaches further. A scale maps the largest value to the largest of the dtype:
one for each token of activations, so that no token depends on others, and one for each
weight. Gradients of weights, which are sums over tokens, need one scale for all tokens
of a device; their rounding differs between layouts. Products are added up in float32.

Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433, section 3.
"""

import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp

from meshpar.arrays import Array
from meshpar.errors import MeshparError

_Saved = tuple[Any, Any]
"""Both operands of a matmul, quantized."""


def matmul(x: Array, w: Array, dims: int = 1) -> Array:
    """Contracts the last dims of x with the first of w, forward and backward in float8.

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
    y = _matmul(x.reshape(-1, size), w.reshape(size, -1))
    return y.reshape(*x.shape[:free], *w.shape[dims:])


def _qwix() -> Any:
    try:
        return importlib.import_module("qwix")
    except ImportError:
        raise MeshparError(
            'matmuls in float8 need qwix: pip install "meshpar[float8]"'
        ) from None


@jax.custom_vjp
def _matmul(x_RD: Array, w_DF: Array) -> Array:
    return _forward(x_RD, w_DF)[0]


def _forward(x_RD: Array, w_DF: Array) -> tuple[Array, _Saved]:
    x, w = _by_row(x_RD, jnp.float8_e4m3fn), _quantized(w_DF, jnp.float8_e4m3fn)
    return _dot(x, w, (1, 0), x_RD.dtype), (x, w)


def _backward(saved: _Saved, dy_RF: Array) -> tuple[Array, Array]:
    x, w = saved
    dx_RD = _dot(_by_row(dy_RF, jnp.float8_e5m2), w, (1, 1), dy_RF.dtype)
    # The scales of x stand along the sum: they go to the other operand.
    scaled = _quantized(dy_RF * x.scale, jnp.float8_e5m2)
    return dx_RD, _dot(x.qvalue, scaled, (0, 0), dy_RF.dtype)


_matmul.defvjp(_forward, _backward)


def _quantized(x: Array, dtype: Any, **options: Any) -> Any:
    return _qwix().quantize(x, dtype, scale_dtype=jnp.float32, **options)


def _by_row(x_RD: Array, dtype: Any) -> Any:
    return _quantized(x_RD, dtype, channelwise_axes=(0,))


def _dot(x: Any, y: Any, dims: tuple[int, int], dtype: Any) -> Array:
    """Contracts one dim of x with one of y."""
    numbers = ((dims[:1], dims[1:]), ((), ()))
    dot = _qwix().dot_general(x, y, numbers, preferred_element_type=jnp.float32)
    return dot.astype(dtype)
