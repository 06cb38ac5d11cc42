"""Activations of feed-forward layers; on CPUs they keep their slopes.

Elementwise programs are as fast as memory on CPUs. Saved slopes take one pass over
memory in the backward pass, where the derivative of the formula takes several. They are
`computed` where they are saved; compilers would compute them again where they are read.
"""

import jax
import jax.numpy as jnp
import numpy as np

from meshpar.arrays import Array
from meshpar.mesh.order import computed
from meshpar.mesh.platform import CPU, traced_platform


def gelu(x: Array) -> Array:
    """GELU in its tanh form (Hendrycks and Gimpel, arXiv:1606.08415)."""
    return _gelu(x) if traced_platform() is CPU else jax.nn.gelu(x)


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up (Shazeer, arXiv:2002.05202)."""
    return _swiglu(gate, up) if traced_platform() is CPU else jax.nn.silu(gate) * up


def geglu(gate: Array, up: Array) -> Array:
    """gelu(gate) * up (Shazeer, arXiv:2002.05202)."""
    return gelu(gate) * up


@jax.custom_vjp
def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x)


def _gelu_forward(x: Array) -> tuple[Array, Array]:
    scale, cubic = np.sqrt(2 / np.pi).astype(x.dtype), 0.044715
    tanh = jnp.tanh(scale * (x + cubic * x**3))
    inner = scale * (1 + 3 * cubic * x * x)
    slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner
    return computed((0.5 * x * (1 + tanh), slope))


_gelu.defvjp(_gelu_forward, lambda slope, dy: (slope * dy,))


@jax.custom_vjp
def _swiglu(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


def _swiglu_forward(gate: Array, up: Array) -> tuple[Array, tuple[Array, Array]]:
    sigmoid = jax.nn.sigmoid(gate)
    silu = gate * sigmoid
    slope = up * (sigmoid + silu * (1 - sigmoid))
    y, *slopes = computed((silu * up, slope, silu))
    return y, tuple(slopes)


_swiglu.defvjp(_swiglu_forward, lambda slopes, dy: tuple(x * dy for x in slopes))
