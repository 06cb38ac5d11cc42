"""Small GPT-2-style decoder in Flax Linen; the tests run both Flax APIs."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import meshpar
from experiments.models.decoder_config import GPT2_KIND, DecoderConfig
from experiments.models.loss import cross_entropy, with_weight
from meshpar import layouts
from meshpar.arrays import Array
from meshpar.errors import MeshparError
from meshpar.ops import vocabulary

KIND = GPT2_KIND | {"bias": False, "norm_eps": 1e-6, "float8": False}
KIND |= dict.fromkeys(("loss_block", "num_experts", "window"), 0)
"""Fields of `DecoderConfig` that the Linen decoder requires."""


def check_kind(config: DecoderConfig) -> None:
    """Raises MeshparError for a configuration that only the NNX decoder supports."""
    required = KIND | {"kv_heads": config.heads}
    for name, value in required.items():
        if getattr(config, name) != value:
            raise MeshparError(
                f"model.{name}={getattr(config, name)!r}: the Linen decoder "
                f"supports only {name}={value!r}; use that, or framework=nnx"
            )


def _norm(config: DecoderConfig) -> nn.LayerNorm:
    ones = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
    zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("embed",))
    return nn.LayerNorm(config.norm_eps, scale_init=ones, bias_init=zeros)


def _weight(module: nn.Module, name: str, std: float, **dims: int) -> Array:
    """A weight with normal entries; `dims` gives names and sizes of its dims."""
    init = nn.with_logical_partitioning(nn.initializers.normal(std), tuple(dims))
    return module.param(name, init, tuple(dims.values()))


class LinenBlock(nn.Module):
    """One layer; `train` turns dropout on."""

    config: DecoderConfig
    train: bool

    @nn.compact
    def __call__(self, x_BLD: Array, _) -> tuple[Array, None]:
        config = self.config
        d, n, h, f = config.embed, config.heads, config.head_dim, config.mlp
        dropout = nn.Dropout(config.dropout, deterministic=not self.train)
        y_BLD, heads = _norm(config)(x_BLD), []
        for name in "qkv":
            w_DNH = _weight(self, name, d**-0.5, embed=d, heads=n, head_dim=h)
            y_BLNH = jnp.einsum("BLD,DNH->BLNH", y_BLD, w_DNH)
            heads.append(
                layouts.constrain(y_BLNH, "batch", "length", "heads", "head_dim")
            )
        y_BLNH = jax.nn.dot_product_attention(*heads, is_causal=True)
        w_NHD = _weight(self, "o", d**-0.5, heads=n, head_dim=h, embed=d)
        x_BLD += dropout(jnp.einsum("BLNH,NHD->BLD", y_BLNH, w_NHD))
        w_DF = _weight(self, "up", d**-0.5, embed=d, mlp=f)
        h_BLF = jax.nn.gelu(jnp.einsum("BLD,DF->BLF", _norm(config)(x_BLD), w_DF))
        h_BLF = layouts.constrain(h_BLF, "batch", "length", "mlp")
        w_FD = _weight(self, "down", f**-0.5, mlp=f, embed=d)
        x_BLD += dropout(jnp.einsum("BLF,FD->BLD", h_BLF, w_FD))
        return layouts.constrain(x_BLD, "batch", "length", "embed"), None


class LinenDecoder(nn.Module):
    """Learned positions, LayerNorm, GELU, tied head, layers scanned."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, tokens_BL: Array, train: bool = False) -> Array:
        config = self.config
        d, v = config.embed, config.vocab
        embedding_VD = _weight(self, "embedding", d**-0.5, vocab=v, embed=d)
        w_LD = _weight(self, "positions", 0.02, length=config.length, embed=d)
        w_VD = layouts.constrain(embedding_VD, "vocab", None)
        x_BLD = w_VD[tokens_BL] + w_LD[None, : tokens_BL.shape[1]]
        x_BLD = layouts.constrain(x_BLD, "batch", "length", "embed")
        stack = nn.scan(
            LinenBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=config.depth,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x_BLD, _ = stack(config, train, name="blocks")(x_BLD, None)
        return vocabulary.logits(_norm(config)(x_BLD), embedding_VD.T)


def language_model(config: DecoderConfig, layers: str = "blocks") -> meshpar.Model:
    """The decoder with next-token cross-entropy, as a model with a stack of layers.

    Its batches are those of the NNX decoder.

    Args:
      config: the decoder.
      layers: path of the layers; "" leaves them to the module.

    Raises:
      MeshparError: only the NNX decoder supports the configuration.
    """
    check_kind(config)

    def loss(apply: Callable, batch: dict[str, Array], **options: Any) -> Any:
        logits_BLV = apply(batch["tokens"], **options)
        mean = cross_entropy(logits_BLV, batch["targets"], batch.get("weights"))
        return with_weight(mean, batch)

    return meshpar.from_linen(
        LinenDecoder(config),
        functools.partial(loss, train=True),
        jax.ShapeDtypeStruct((1, config.length), jnp.int32),
        loss,
        layers=layers,
    )
