"""Decoder-only transformer in NNX: GPT-2 or Llama by configuration.

Layers are stacked on a leading dim named "layers" and scanned. The shape letters are
explained in `meshpar/arrays.py`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import meshpar
from experiments.models.decoder_config import DecoderConfig
from experiments.models.loss import (
    blockwise_cross_entropy,
    cross_entropy,
    logits,
    with_experts,
    with_weight,
)
from experiments.models.mlp import ExpertMlp, Mlp
from experiments.models.weights import bias, plus, times, weight
from meshpar import layouts, vocabulary
from meshpar.arrays import Array
from meshpar.ops import context
from meshpar.ops.experts import Statistics


def _residual(x_BLD: Array) -> Array:
    """Splits the residual stream along the length over the tensor axis.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer
      Models, arXiv:2205.05198, section 4.2.2 (sequence parallelism).
    """
    return layouts.constrain(x_BLD, "batch", "residual_length", "embed")


def _gathered(x_BLD: Array) -> Array:
    """Gathers whole sequences, the input of attention, mlp and head."""
    return layouts.constrain(x_BLD, "batch", "length", "embed")


class Packed(NamedTuple):
    """Documents that share a sequence.

    Attributes:
      segments: number of the document of each token, int32 [B, L].
      positions: place of each token in its document, int32 [B, L].
    """

    segments: Array
    positions: Array

    @classmethod
    def of(cls, batch: dict[str, Array]) -> "Packed | None":
        """The documents of a batch; None for one document per sequence."""
        if "segments" not in batch:
            return None
        return cls(batch["segments"], batch["positions"])


def _positions(length: int, packed: Packed | None) -> Array:
    """Positions of tokens in their documents, integer [1, L] or [B, L]."""
    return context.positions(length)[None] if packed is None else packed.positions


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


def rotate(x_BLNH: Array, positions: Array, theta: float) -> Array:
    """Rotary position embedding (Su et al., RoFormer, arXiv:2104.09864).

    Args:
      x_BLNH: queries or keys.
      positions: of the tokens, integer [1, L] or [B, L].
      theta: base of the wavelengths.
    """
    dim = x_BLNH.shape[-1]
    frequency = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angle = positions.astype(jnp.float32)[..., None] * frequency[None, None]
    sin, cos = jnp.sin(angle)[:, :, None], jnp.cos(angle)[:, :, None]
    first, second = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x_BLNH.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention, perhaps with normalized queries and keys.

    Source: Ainslie et al., GQA, arXiv:2305.13245; Dehghani et al., arXiv:2302.05442,
      section 2 (normalized queries and keys).
    """

    def __init__(self, config: DecoderConfig, window: int, rngs: nnx.Rngs):
        self.config, self.window = config, window
        d, n, k, h = config.embed, config.heads, config.kv_heads, config.head_dim
        self.q = weight(rngs, config, d, embed=d, heads=n, head_dim=h)
        self.k = weight(rngs, config, d, embed=d, kv_heads=k, head_dim=h)
        self.v = weight(rngs, config, d, embed=d, kv_heads=k, head_dim=h)
        out_scale = (2 * config.depth) ** -0.5
        self.o = weight(rngs, config, d, out_scale, heads=n, head_dim=h, embed=d)
        self.q_bias = bias(config, heads=n, head_dim=h)
        self.k_bias = bias(config, kv_heads=k, head_dim=h)
        self.v_bias = bias(config, kv_heads=k, head_dim=h)
        self.o_bias = bias(config, embed=d)
        self.q_norm = Norm(config, head_dim=h) if config.qk_norm else None
        self.k_norm = Norm(config, head_dim=h) if config.qk_norm else None

    def __call__(self, x_BLD: Array, packed: Packed | None) -> Array:
        q_BLNH = jnp.einsum("BLD,DNH->BLNH", x_BLD, self.q[...])
        k_BLKH = jnp.einsum("BLD,DKH->BLKH", x_BLD, self.k[...])
        v_BLKH = jnp.einsum("BLD,DKH->BLKH", x_BLD, self.v[...])
        q_BLNH = plus(q_BLNH, self.q_bias)
        k_BLKH = plus(k_BLKH, self.k_bias)
        v_BLKH = plus(v_BLKH, self.v_bias)
        if self.q_norm is not None:
            q_BLNH, k_BLKH = self.q_norm(q_BLNH), self.k_norm(k_BLKH)
        if self.config.position == "rope":
            positions = _positions(x_BLD.shape[1], packed)
            q_BLNH = rotate(q_BLNH, positions, self.config.rope_theta)
            k_BLKH = rotate(k_BLKH, positions, self.config.rope_theta)
        q_BLNH = layouts.constrain(q_BLNH, "batch", "length", "heads", "head_dim")
        k_BLKH = layouts.constrain(k_BLKH, "batch", "length", "kv_heads", "head_dim")
        v_BLKH = layouts.constrain(v_BLKH, "batch", "length", "kv_heads", "head_dim")
        segments_BL = None if packed is None else packed.segments
        y_BLNH = context.attention(
            q_BLNH, k_BLKH, v_BLKH, window=self.window, segments_BL=segments_BL
        )
        y_BLNH = layouts.constrain(y_BLNH, "batch", "length", "heads", "head_dim")
        return plus(jnp.einsum("BLNH,NHD->BLD", y_BLNH, self.o[...]), self.o_bias)


class Block(nnx.Module):
    """One pre-norm transformer layer, whose attention may have a window."""

    def __init__(self, config: DecoderConfig, window: int, rngs: nnx.Rngs):
        self.attention_norm = Norm(config, embed=config.embed)
        self.attention = Attention(config, window, rngs)
        self.mlp_norm = Norm(config, embed=config.embed)
        self.has_experts = config.num_experts > 0
        self.mlp = (ExpertMlp if self.has_experts else Mlp)(config, rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: Any, packed: Packed | None = None) -> Any:
        """Runs x_BLD; with experts (x_BLD, packed statistics of the layers before)."""
        x_BLD, *earlier = x if self.has_experts else (x,)
        y_BLD = self.attention(_gathered(self.attention_norm(x_BLD)), packed)
        x_BLD = _residual(x_BLD + self.dropout(_residual(y_BLD)))
        y_BLD = self.mlp(_gathered(self.mlp_norm(x_BLD)))
        if not earlier:
            return _residual(x_BLD + self.dropout(_residual(y_BLD)))
        y_BLD, statistics = y_BLD
        x_BLD = _residual(x_BLD + self.dropout(_residual(y_BLD)))
        return x_BLD, statistics.after(*earlier)


class Pattern(nnx.Module):
    """Layers with windows of their own, which repeat through the depth.

    Source: Gemma Team, Gemma 3, arXiv:2503.19786, section 2 (local and global layers).
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        blocks = (Block(config, window, rngs) for window in config.windows)
        self.layers = nnx.List(blocks)

    def __call__(self, x: Any, packed: Packed | None = None) -> Any:
        """Runs the layers one after another, as `Block` does."""
        for block in self.layers:
            x = block(x, packed)
        return x


class Decoder(nnx.Module):
    """Decoder-only language model.

    Source: Radford et al., GPT-2 (2019); Touvron et al., Llama, arXiv:2302.13971.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        if config.vocab == 0:
            raise ValueError(
                "vocab=0: set the vocabulary of the data before making a model"
            )
        self.config = config
        d, v = config.embed, config.vocab
        # A lookup has fan_in 1; a tied head needs 1/sqrt(d) for logits of order one.
        std = d**-0.5 if config.tied else 1.0
        self.embedding = weight(rngs, config, 1, std, vocab=v, embed=d)
        positions = dict(length=config.length, embed=d)
        self.positions = (
            weight(rngs, config, 1, 0.1 * std, **positions)
            if config.position == "learned"
            else None
        )

        @nnx.split_rngs(splits=config.depth // len(config.windows))
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def stacked(rngs: nnx.Rngs) -> Block | Pattern:
            if config.global_every:
                return Pattern(config, rngs)
            return Block(config, config.window, rngs)

        self.blocks = stacked(rngs)
        self.norm = Norm(config, embed=d)
        self.head = None if config.tied else weight(rngs, config, d, embed=d, vocab=v)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, tokens_BL: Array) -> Array:
        """Returns logits_BLV for token ids of at most `config.length`."""
        graph, params, rest = nnx.split(self.blocks, nnx.Param, ...)

        def layer(x: Any, state) -> tuple[Any, None]:
            return nnx.merge(graph, *state)(x), None

        x, _ = jax.lax.scan(layer, self.embed(tokens_BL), (params, rest))
        x_BLD = x[0] if self.config.num_experts else x
        return logits(self.norm(x_BLD), self.head_weight())

    def embed(self, tokens_BL: Array, packed: Packed | None = None) -> Any:
        """Returns the input of the first `Block`."""
        if tokens_BL.shape[1] > self.config.length:
            raise ValueError(
                f"tokens {tokens_BL.shape} are longer than length={self.config.length}"
            )
        # ZeRO-3 gathers the table: a lookup in a table split along D would move
        # activations instead.
        w_VD = layouts.constrain(self.embedding[...], "vocab", None)
        x_BLD = vocabulary.lookup(w_VD, tokens_BL)
        if self.positions is not None:
            x_BLD += self.positions[...][_positions(tokens_BL.shape[1], packed)]
        x_BLD = _residual(self.dropout(x_BLD))
        return (
            (x_BLD, jnp.zeros(len(Statistics._fields)))
            if self.config.num_experts
            else x_BLD
        )

    def head_weight(self) -> Array:
        """Returns the head w[D, V]: the transposed embedding if it is tied."""
        return self.embedding[...].T if self.head is None else self.head[...]

    def head_loss(self, x_BLD: Array, targets_BL: Array, *weights_BL: Array) -> Array:
        """Mean next-token cross-entropy, in nats, of the last layer's output x_BLD."""
        x_BLD, w_DV = _gathered(self.norm(x_BLD)), self.head_weight()
        if not (block := self.config.loss_block):
            return cross_entropy(logits(x_BLD, w_DV), targets_BL, *weights_BL)
        return blockwise_cross_entropy(x_BLD, w_DV, targets_BL, block, *weights_BL)


def language_model(config: DecoderConfig) -> meshpar.Model:
    """The decoder with next-token cross-entropy, as a model with a stack of layers.

    Its batches are {"tokens": ids_BL, "targets": ids_BL}, both int32, and perhaps
    "weights", float32 [B, L]: the weight of every token in the mean loss. Packed
    documents have "segments" and "positions" (`Packed`).
    """

    def head_loss(decoder: Decoder, x: Any, batch: dict[str, Array]) -> Any:
        x_BLD, *statistics = x if config.num_experts else (x,)
        weights = [batch["weights"]] if "weights" in batch else []
        loss = decoder.head_loss(x_BLD, batch["targets"], *weights)
        if not statistics:
            return with_weight(loss, batch)
        training = not decoder.dropout.deterministic
        loss, metrics = with_experts(
            loss, Statistics.unpacked(*statistics), config, training
        )
        return with_weight(loss, batch, metrics)

    stack = meshpar.LayerStack(
        stack="blocks",
        embed=lambda decoder, batch: decoder.embed(batch["tokens"], Packed.of(batch)),
        layer=lambda block, x, packed: block(x, packed),
        head_loss=head_loss,
        context=lambda decoder, batch: Packed.of(batch),
    )
    return meshpar.from_nnx(lambda rngs: Decoder(config, rngs), stack)
