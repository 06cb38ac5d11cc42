"""RMSNorm and LayerNorm with named dims, in NNX."""

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.models.decoder_config import DecoderConfig
from experiments.models.weights import plus, times
from meshpar.arrays import Array
from meshpar.ops.joint_norm import rms_normalized


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last dim, or RMSNorm over several; in float32."""

    def __init__(self, config: DecoderConfig, **dims: int):
        self.centered, self.eps = config.norm == "layernorm", config.norm_eps
        self.plus_one, self.names = config.norm_plus_one, tuple(dims)
        sizes = tuple(dims.values())
        ones = jnp.zeros(sizes) if self.plus_one else jnp.ones(sizes)
        self.scale = nnx.Param(ones, out_sharding=self.names)
        zeros = nnx.Param(jnp.zeros(sizes), out_sharding=self.names)
        self.bias = zeros if self.centered else None

    def __call__(self, x: Array) -> Array:
        """Normalizes x[..., D]; over several dims x[B, L, ...]."""
        y = self._normalized(x.astype(jnp.float32))
        if self.plus_one:  # In float32: bfloat16 would round small scales away.
            y = y + times(y, self.scale)
        else:
            y = times(y.astype(x.dtype), self.scale)
        return plus(y.astype(x.dtype), self.bias)

    def _normalized(self, y: Array) -> Array:
        if len(self.names) > 1:
            names = "batch", "length", *self.names
            return rms_normalized(y, names, len(self.names), self.eps)
        if self.centered:
            y = y - jnp.mean(y, -1, keepdims=True)
        return y * jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + self.eps)
