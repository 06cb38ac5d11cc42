"""Attention of a decoder: over whole sequences, packed documents, or a cache."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from experiments.models.decoder_config import DecoderConfig
from experiments.models.norm import Norm
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
            q_BLNH = rotate(q_BLNH, positions, self.config.rope_theta)
            k_BLKH = rotate(k_BLKH, positions, self.config.rope_theta)
        q_BLNH = layouts.constrain(q_BLNH, "batch", "length", "heads", "head_dim")
        k_BLKH = layouts.constrain(k_BLKH, "batch", "length", "kv_heads", "head_dim")
        v_BLKH = layouts.constrain(v_BLKH, "batch", "length", "kv_heads", "head_dim")
        y_BLNH = _attend(q_BLNH, k_BLKH, v_BLKH, self.window, tokens)
        y_BLNH = layouts.constrain(y_BLNH, "batch", "length", "heads", "head_dim")
        names = "heads", "head_dim", "embed"
        matmul = self.config.matmul
        return plus(row_parallel(y_BLNH, self.o[...], names, matmul), self.o_bias)
