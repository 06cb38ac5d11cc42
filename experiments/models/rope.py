"""Rotary position embeddings, and longer wavelengths for longer sequences."""

import math
from typing import NamedTuple

import jax.numpy as jnp

from meshpar.arrays import Array


class Rope(NamedTuple):
    """Rotary wavelengths; `DecoderConfig` explains the fields (`rope_*`)."""

    theta: float
    factor: float = 1.0
    length: int = 0
    low: float = 1.0
    high: float = 4.0

    def frequencies(self, dim: int) -> Array:
        """Radians per token of each pair of numbers of a head, float32 [dim / 2].

        Source: Chen et al., arXiv:2306.15595 (all wavelengths); Llama Team, Llama 3,
          arXiv:2407.21783, and its reference code (those of few turns).
        """
        frequency = self.theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
        if self.factor == 1:
            return frequency
        kept = 0.0
        if self.length:
            turns = self.length / (2 * math.pi) * frequency
            kept = jnp.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


def rotate(x_BLNH: Array, positions: Array, rope: Rope) -> Array:
    """Rotary position embedding (Su et al., RoFormer, arXiv:2104.09864).

    Args:
      x_BLNH: queries or keys.
      positions: of the tokens, integer [1, L] or [B, L].
      rope: the wavelengths.
    """
    frequency = rope.frequencies(x_BLNH.shape[-1])
    angle = positions.astype(jnp.float32)[..., None] * frequency[None, None]
    sin, cos = jnp.sin(angle)[:, :, None], jnp.cos(angle)[:, :, None]
    first, second = jnp.split(x_BLNH.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x_BLNH.dtype)
