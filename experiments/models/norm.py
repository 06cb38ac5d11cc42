"""RMSNorm and LayerNorm with named dims, in NNX."""

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.models.decoder_config import DecoderConfig
from experiments.models.weights import plus, times
from meshpar.arrays import Array


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last dim, computed in float32."""

    def __init__(self, config: DecoderConfig, **dim: int):
        self.centered, self.eps = config.norm == "layernorm", config.norm_eps
        (name,), size = dim, tuple(dim.values())
        self.scale = nnx.Param(jnp.ones(size), out_sharding=(name,))
        zeros = nnx.Param(jnp.zeros(size), out_sharding=(name,))
        self.bias = zeros if self.centered else None

    def __call__(self, x: Array) -> Array:
        """Normalizes x[..., D]."""
        y = x.astype(jnp.float32)
        if self.centered:
            y = y - jnp.mean(y, -1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + self.eps)
        return plus(times(y.astype(x.dtype), self.scale), self.bias)
