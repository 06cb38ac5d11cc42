"""Feed-forward layers of a decoder: one for all tokens, or a mixture of experts."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from experiments.models.decoder_config import DecoderConfig
from experiments.models.weights import bias, plus, weight
from meshpar import layouts
from meshpar.arrays import Array
from meshpar.ops import experts
from meshpar.ops.activations import geglu, gelu, swiglu
from meshpar.ops.tensor_parallel import column_parallel, row_parallel

_GATED = {"swiglu": swiglu, "geglu": geglu}


class Mlp(nnx.Module):
    """Feed-forward layer: SwiGLU, GEGLU (Shazeer, arXiv:2002.05202) or GELU."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        d, f = config.embed, config.mlp
        self.matmul = config.matmul
        self.activation = _GATED.get(config.activation, gelu)
        self.gate = weight(rngs, config, d, embed=d, mlp=f) if config.gated else None
        self.up = weight(rngs, config, d, embed=d, mlp=f)
        out_scale = (2 * config.depth) ** -0.5
        self.down = weight(rngs, config, f, out_scale, mlp=f, embed=d)
        self.gate_bias = bias(config.bias and config.gated, mlp=f)
        self.up_bias = bias(config.bias, mlp=f)
        self.down_bias = bias(config.bias, embed=d)

    def __call__(self, x_BLD: Array) -> Array:
        weights = [w for w in (self.up, self.gate) if w is not None]
        named = ((w[...], ("embed", "mlp")) for w in weights)
        h_BLF, *gate_BLF = column_parallel(x_BLD, *named, matmul=self.matmul)
        h_BLF = plus(h_BLF, self.up_bias)
        gate_BLF = [plus(x, self.gate_bias) for x in gate_BLF]
        h_BLF = self.activation(*gate_BLF, h_BLF)
        h_BLF = layouts.constrain(h_BLF, "batch", "length", "mlp")
        h_BLF = checkpoint_name(h_BLF, "mlp_hidden")
        y_BLD = row_parallel(h_BLF, self.down[...], ("mlp", "embed"), self.matmul)
        return plus(y_BLD, self.down_bias)


class ExpertMlp(nnx.Module):
    """A mixture of experts, beside shared experts that every token goes to.

    Source: Shazeer et al., arXiv:1701.06538; Dai et al., DeepSeekMoE, arXiv:2401.06066,
      section 3.2 (shared experts).
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.mixture, self.gated = config.mixture, config.gated
        self.activation = jax.nn.silu if config.activation == "swiglu" else jax.nn.gelu
        self.deterministic = False  # NNX sets it in evaluation mode.
        d, f, e = config.embed, config.mlp, config.num_experts
        router = jax.random.normal(rngs.params(), (d, e)) * d**-0.5
        self.router = nnx.Param(router, out_sharding=("embed", None))
        zeros = nnx.Param(jnp.zeros(e), out_sharding=("expert_load",))
        self.router_bias = zeros if config.router_bias else None
        into = dict(expert=e, embed=d, mlp=f)
        self.gate = weight(rngs, config, d, **into) if self.gated else None
        self.up = weight(rngs, config, d, **into)
        out_scale = (2 * config.depth) ** -0.5
        self.down = weight(rngs, config, f, out_scale, expert=e, mlp=f, embed=d)
        beside = dataclasses.replace(config, mlp=max(1, config.shared_experts) * f)
        self.shared = Mlp(beside, rngs) if config.shared_experts else None
        self.rngs = rngs.dropout.fork() if config.router_jitter else None

    def __call__(self, x_BLD: Array) -> tuple[Array, experts.Statistics]:
        """Returns (y_BLD, the statistics of the mixture)."""
        jitters = self.rngs is not None and not self.deterministic
        mixed = experts.mixture(
            x_BLD,
            self.router[...],
            experts.Experts(
                self.up[...],
                self.down[...],
                self.gate[...] if self.gated else None,
            ),
            self.mixture,
            activation=self.activation,
            bias_E=None if self.router_bias is None else self.router_bias[...],
            key=self.rngs() if jitters else None,
        )
        y_BLD = mixed.y
        if self.shared is not None:
            y_BLD += self.shared(x_BLD)
        return y_BLD, mixed.statistics
