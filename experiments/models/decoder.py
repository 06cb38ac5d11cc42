"""Decoder-only transformer in NNX: GPT-2 or Llama by configuration.

Layers are stacked on a leading dim named "layers" and scanned. The shape letters are
explained in `meshpar/arrays.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.models.attention import (
    Attention,
    Cached,
    Packed,
    Tokens,
    positions_of,
)
from experiments.models.decoder_config import DecoderConfig
from experiments.models.loss import mean
from experiments.models.mlp import ExpertMlp, Mlp
from experiments.models.norm import Norm
from experiments.models.weights import weight
from meshpar import layouts
from meshpar.arrays import Array
from meshpar.ops import vocabulary
from meshpar.ops.cached_attention import KeysAndValues
from meshpar.ops.experts import Statistics
from meshpar.ops.layer_loop import over_layers


def _residual(x_BLD: Array) -> Array:
    """Splits the residual stream along the length over the tensor axis.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer
      Models, arXiv:2205.05198, section 4.2.2 (sequence parallelism).
    """
    return layouts.constrain(x_BLD, "batch", "residual_length", "embed")


def _normed(x_BLD: Array, norm: Norm | None) -> Array:
    return x_BLD if norm is None else norm(x_BLD)


class Block(nnx.Module):
    """One transformer layer, whose attention may have a window.

    Source: OLMo Team, OLMo 2, arXiv:2501.00656, section 3.1 (norms after); Gemma Team,
      Gemma 2, arXiv:2408.00118, section 2 (norms before and after).
    """

    def __init__(self, config: DecoderConfig, window: int, rngs: nnx.Rngs):
        before, after = config.norm_place != "after", config.norm_place != "before"
        self.attention_norm = Norm(config, embed=config.embed) if before else None
        self.attention = Attention(config, window, rngs)
        self.attention_post_norm = Norm(config, embed=config.embed) if after else None
        self.mlp_norm = Norm(config, embed=config.embed) if before else None
        self.mlp_post_norm = Norm(config, embed=config.embed) if after else None
        self.has_experts = config.num_experts > 0
        self.mlp = (ExpertMlp if self.has_experts else Mlp)(config, rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: Any, tokens: Tokens = None) -> Any:
        """Runs x_BLD; with experts (x_BLD, statistics of the layers before)."""
        x_BLD, *earlier = x if self.has_experts else (x,)
        y_BLD = self.attention(_normed(x_BLD, self.attention_norm), tokens)
        x_BLD = self._plus(x_BLD, y_BLD, self.attention_post_norm)
        y_BLD = self.mlp(_normed(x_BLD, self.mlp_norm))
        if not earlier:
            return self._plus(x_BLD, y_BLD, self.mlp_post_norm)
        y_BLD, statistics = y_BLD
        x_BLD = self._plus(x_BLD, y_BLD, self.mlp_post_norm)
        return x_BLD, statistics.after(*earlier)

    def _plus(self, x_BLD: Array, y_BLD: Array, norm: Norm | None) -> Array:
        """The residual stream with what attention or mlp adds to it."""
        return _residual(x_BLD + self.dropout(_normed(_residual(y_BLD), norm)))


class Pattern(nnx.Module):
    """Layers with windows of their own, which repeat through the depth.

    Source: Gemma Team, Gemma 3, arXiv:2503.19786, section 2 (local and global layers).
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        blocks = (Block(config, window, rngs) for window in config.windows)
        self.layers = nnx.List(blocks)

    def __call__(self, x: Any, tokens: Tokens = None) -> Any:
        """Runs the layers one after another, as `Block` does."""
        for block in self.layers:
            x = block(x, tokens)
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

    def __call__(self, tokens_BL: Array, tokens: Packed | None = None) -> Array:
        """Returns logits_BLV for token ids of at most `config.length`."""
        graph, params, rest = nnx.split(self.blocks, nnx.Param, ...)

        def layer(x: Any, state) -> tuple[Any, None]:
            return nnx.merge(graph, *state)(x, tokens), None

        x, _ = jax.lax.scan(layer, self.embed(tokens_BL, tokens), (params, rest))
        return self._head(x)

    def with_cache(
        self, tokens_BL: Array, positions_BL: Array, cache: KeysAndValues
    ) -> tuple[Array, KeysAndValues]:
        """Runs new tokens of sequences whose earlier tokens are cached.

        Args:
          tokens_BL: token ids.
          positions_BL: their places in their sequences.
          cache: of all layers.

        Returns:
          (logits_BLV, the cache with the new tokens).
        """
        graph, params, rest = nnx.split(self.blocks, nnx.Param, ...)

        def layer(carry: tuple, state: Any) -> tuple:
            x, cache, number = carry
            tokens = Cached(cache, number, positions_BL)
            x = nnx.merge(graph, *state)(x, tokens)
            return x, tokens.cache, tokens.layer

        first = Cached(cache, jnp.int32(0), positions_BL)
        start = self.embed(tokens_BL, first), cache, first.layer
        x, cache, _ = over_layers(layer, start, (params, rest))
        return self._head(x), cache

    def _head(self, x: Any) -> Array:
        """The logits of the last layer's output."""
        x_BLD = x[0] if self.config.num_experts else x
        return vocabulary.logits(self.norm(x_BLD), self.head_weight())

    def embed(self, tokens_BL: Array, tokens: Tokens = None) -> Any:
        """Returns the input of the first `Block`."""
        is_whole = not isinstance(tokens, Cached)
        if is_whole and tokens_BL.shape[1] > self.config.length:
            raise ValueError(
                f"tokens {tokens_BL.shape} are longer than length={self.config.length}"
            )
        # In training ZeRO-3 gathers the table: a lookup in a table split along D would
        # move activations instead, which are fewer where one token is decoded.
        w_VD = layouts.constrain(self.embedding[...], "vocab", "embed")
        x_BLD = vocabulary.lookup(w_VD, tokens_BL)
        if self.config.embedding_scale != 1:
            x_BLD *= self.config.embedding_scale
        if self.positions is not None:
            x_BLD += self.positions[...][positions_of(tokens_BL.shape[1], tokens)]
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
        head = self.norm(x_BLD), self.head_weight()
        losses_BL = vocabulary.head_losses(*head, targets_BL, self.config.loss_block)
        return mean(losses_BL, *weights_BL)
