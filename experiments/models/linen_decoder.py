"""A small pre-norm decoder in Linen, so that both Flax APIs stay proven."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from experiments.models.decoder import DecoderConfig
from meshpar import layouts


def _dense(features, names, axis=-1):
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)
    return nn.DenseGeneral(features, axis=axis, use_bias=False, kernel_init=init)


def _norm():
    ones = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
    zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("embed",))
    return nn.LayerNorm(scale_init=ones, bias_init=zeros)


class LinenBlock(nn.Module):
    """One layer; `train` turns dropout on."""

    config: DecoderConfig
    train: bool

    @nn.compact
    def __call__(self, x_BLD: jax.Array, _) -> tuple[jax.Array, None]:
        config = self.config
        heads, head_dim = config.heads, config.head_dim
        y_BLD = _norm()(x_BLD)
        q_BLNH, k_BLNH, v_BLNH = (
            layouts.constrain(
                _dense((heads, head_dim), ("embed", "heads", "head_dim"))(y_BLD),
                *("batch", "length", "heads", "head_dim"),
            )
            for _ in range(3)
        )
        y_BLNH = jax.nn.dot_product_attention(q_BLNH, k_BLNH, v_BLNH, is_causal=True)
        out = _dense(config.embed, ("heads", "head_dim", "embed"), axis=(-2, -1))
        x_BLD += nn.Dropout(config.dropout, deterministic=not self.train)(out(y_BLNH))
        h_BLF = jax.nn.gelu(_dense(config.mlp, ("embed", "mlp"))(_norm()(x_BLD)))
        h_BLF = layouts.constrain(h_BLF, "batch", "length", "mlp")
        y_BLD = _dense(config.embed, ("mlp", "embed"))(h_BLF)
        x_BLD += nn.Dropout(config.dropout, deterministic=not self.train)(y_BLD)
        return layouts.constrain(x_BLD, "batch", "length", "embed"), None


class LinenDecoder(nn.Module):
    """Learned positions, LayerNorm, GELU, tied head, layers scanned."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, tokens_BL: jax.Array, train: bool = False) -> jax.Array:
        config = self.config
        embed = self.param(
            "embedding",
            nn.with_logical_partitioning(
                nn.initializers.normal(config.embed**-0.5), ("vocab", "embed")
            ),
            (config.vocab, config.embed),
        )
        positions = self.param(
            "positions",
            nn.with_logical_partitioning(
                nn.initializers.normal(0.02), ("length", "embed")
            ),
            (config.length, config.embed),
        )
        w_VD = layouts.constrain(embed, "vocab", None)
        x_BLD = w_VD[tokens_BL] + positions[None, : tokens_BL.shape[1]]
        x_BLD = layouts.constrain(x_BLD, "batch", "length", "embed")
        stack = nn.scan(
            layouts.remat(LinenBlock, transform=nn.remat),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=config.depth,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x_BLD, _ = stack(config, train, name="blocks")(x_BLD, None)
        logits_BLV = jnp.einsum("BLD,VD->BLV", _norm()(x_BLD), embed)
        return layouts.constrain(logits_BLV, "batch", "length", "vocab")
