"""Weights and biases with named dims, for NNX modules."""

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.models.decoder_config import DecoderConfig
from meshpar.arrays import Array


def weight(
    rngs: nnx.Rngs, config: DecoderConfig, fan_in: int, scale: float = 1.0, **dims: int
) -> nnx.Param:
    """A weight with normal entries; `dims` gives names and sizes of its dims."""
    std = (config.init_std or fan_in**-0.5) * scale
    value = jax.random.normal(rngs.params(), tuple(dims.values())) * std
    return nnx.Param(value, out_sharding=tuple(dims))


def bias(exists: bool, **dims: int) -> nnx.Param | None:
    """A bias of zeros, or None."""
    if not exists:
        return None
    return nnx.Param(jnp.zeros(tuple(dims.values())), out_sharding=tuple(dims))


def plus(x: Array, param: nnx.Param | None) -> Array:
    """Adds a bias to the last dims of `x`."""
    return x if param is None else x + _aligned(x, param[...])


def times(x: Array, param: nnx.Param) -> Array:
    """Multiplies the last dims of `x` by a scale."""
    return x * _aligned(x, param[...])


def _aligned(x: Array, last: Array) -> Array:
    return last.reshape((1,) * (x.ndim - last.ndim) + last.shape)
