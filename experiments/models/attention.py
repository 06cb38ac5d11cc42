"""Attention of a decoder: over whole sequences, packed documents, or a cache."""

from typing import NamedTuple

from flax import nnx

from experiments.models.decoder_config import DecoderConfig
from experiments.models.norm import Norm
from experiments.models.rope import rotate
from experiments.models.weights import bias, plus, weight
from meshpar import layouts
from meshpar.arrays import Array
from meshpar.ops import context
from meshpar.ops.cached_attention import KeysAndValues, cached_attention
from meshpar.ops.tensor_parallel import column_parallel, row_parallel


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


class Cached:
    """New tokens of sequences, and the keys and values of the tokens before them.

    Attributes:
      cache: of all layers; attention writes the new tokens into it.
      layer: number of the layer that runs next.
      positions: place of each token in its sequence, int32 [B, L].
    """

    def __init__(self, cache: KeysAndValues, layer: Array, positions: Array):
        self.cache, self.layer, self.positions = cache, layer, positions

    def attend(self, q_BLNH: Array, k_BLKH: Array, v_BLKH: Array, window: int) -> Array:
        """Attention of the layer that runs, as in `cached_attention`."""
        y_BLNH, self.cache = cached_attention(
            q_BLNH,
            k_BLKH,
            v_BLKH,
            self.cache,
            self.layer,
            self.positions,
            window=window,
        )
        self.layer += 1
        return y_BLNH


Tokens = Packed | Cached | None
"""How tokens belong together; None for one document per sequence."""


def positions_of(length: int, tokens: Tokens) -> Array:
    """Positions of tokens in their documents, integer [1, L] or [B, L]."""
    return context.positions(length)[None] if tokens is None else tokens.positions


def _attend(
    q_BLNH: Array, k_BLKH: Array, v_BLKH: Array, window: int, tokens: Tokens
) -> Array:
    if isinstance(tokens, Cached):
        return tokens.attend(q_BLNH, k_BLKH, v_BLKH, window)
    segments_BL = None if tokens is None else tokens.segments
    return context.attention(
        q_BLNH, k_BLKH, v_BLKH, window=window, segments_BL=segments_BL
    )


class Attention(nnx.Module):
    """Causal grouped-query attention, perhaps with normalized queries and keys.

    Source: Ainslie et al., GQA, arXiv:2305.13245; Dehghani et al., arXiv:2302.05442,
      section 2 (normalized queries and keys); OLMo Team, OLMo 2, arXiv:2501.00656,
      section 3.2 (over all heads).
    """

    def __init__(self, config: DecoderConfig, window: int, rngs: nnx.Rngs):
        self.config, self.window = config, window
        d, n, k, h = config.embed, config.heads, config.kv_heads, config.head_dim
        self.q = weight(rngs, config, d, embed=d, heads=n, head_dim=h)
        self.k = weight(rngs, config, d, embed=d, kv_heads=k, head_dim=h)
        self.v = weight(rngs, config, d, embed=d, kv_heads=k, head_dim=h)
        out_scale = (2 * config.depth) ** -0.5
        self.o = weight(rngs, config, d, out_scale, heads=n, head_dim=h, embed=d)
        biased = config.bias or config.attention_bias != "none"
        self.q_bias = bias(biased, heads=n, head_dim=h)
        self.k_bias = bias(biased, kv_heads=k, head_dim=h)
        self.v_bias = bias(biased, kv_heads=k, head_dim=h)
        self.o_bias = bias(config.bias or config.attention_bias == "qkvo", embed=d)
        joint = config.qk_norm_joint
        q_dims, k_dims = (dict(heads=n), dict(kv_heads=k)) if joint else ({}, {})
        self.q_norm = Norm(config, **q_dims, head_dim=h) if config.qk_norm else None
        self.k_norm = Norm(config, **k_dims, head_dim=h) if config.qk_norm else None
        # Attention divides by the root of the width of a head.
        self.q_scale = (h / (config.score_width or h)) ** 0.5

    def __call__(self, x_BLD: Array, tokens: Tokens) -> Array:
        q_BLNH, k_BLKH, v_BLKH = column_parallel(
            x_BLD,
            (self.q[...], ("embed", "heads", "head_dim")),
            (self.k[...], ("embed", "kv_heads", "head_dim")),
            (self.v[...], ("embed", "kv_heads", "head_dim")),
            matmul=self.config.matmul,
        )
        q_BLNH = plus(q_BLNH, self.q_bias)
        k_BLKH = plus(k_BLKH, self.k_bias)
        v_BLKH = plus(v_BLKH, self.v_bias)
        if self.q_norm is not None:
            q_BLNH, k_BLKH = self.q_norm(q_BLNH), self.k_norm(k_BLKH)
        if self.config.position == "rope":
            positions = positions_of(x_BLD.shape[1], tokens)
            rope = self.config.rope(self.window)
            q_BLNH = rotate(q_BLNH, positions, rope)
            k_BLKH = rotate(k_BLKH, positions, rope)
        if self.q_scale != 1:
            q_BLNH *= self.q_scale
        q_BLNH = layouts.constrain(q_BLNH, "batch", "length", "heads", "head_dim")
        k_BLKH = layouts.constrain(k_BLKH, "batch", "length", "kv_heads", "head_dim")
        v_BLKH = layouts.constrain(v_BLKH, "batch", "length", "kv_heads", "head_dim")
        y_BLNH = _attend(q_BLNH, k_BLKH, v_BLKH, self.window, tokens)
        y_BLNH = layouts.constrain(y_BLNH, "batch", "length", "heads", "head_dim")
        names = "heads", "head_dim", "embed"
        matmul = self.config.matmul
        return plus(row_parallel(y_BLNH, self.o[...], names, matmul), self.o_bias)
