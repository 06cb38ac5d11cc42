"""RMSNorm and LayerNorm with named dims, in NNX."""

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.models.decoder_config import DecoderConfig
from experiments.models.weights import plus, times
from meshpar.arrays import Array


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last dims, computed in float32."""

    def __init__(self, config: DecoderConfig, **dims: int):
        self.centered, self.eps = config.norm == "layernorm", config.norm_eps
        self.plus_one = config.norm_plus_one
        names, sizes = tuple(dims), tuple(dims.values())
        self.dims = tuple(range(-len(dims), 0))
        ones = jnp.zeros(sizes) if self.plus_one else jnp.ones(sizes)
        self.scale = nnx.Param(ones, out_sharding=names)
        zeros = nnx.Param(jnp.zeros(sizes), out_sharding=names)
        self.bias = zeros if self.centered else None

    def __call__(self, x: Array) -> Array:
        """Normalizes x over its last dims."""
        y = x.astype(jnp.float32)
        if self.centered:
            y = y - jnp.mean(y, self.dims, keepdims=True)
        square = jnp.mean(jnp.square(y), self.dims, keepdims=True)
        y = y * jax.lax.rsqrt(square + self.eps)
        if self.plus_one:  # In float32: bfloat16 would round small scales away.
            y = y + times(y, self.scale)
        else:
            y = times(y.astype(x.dtype), self.scale)
        return plus(y.astype(x.dtype), self.bias)
