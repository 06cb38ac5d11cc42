"""Sampling of tokens: greedy, temperature, top-k and top-p.

The random numbers of a token are a function of the seed, the number of its sequence
and its position alone, so that a seed gives the same text under every layout and in
every batch.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meshpar.arrays import Array
from meshpar.errors import MeshparError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings by which tokens are drawn; greedy by default.

    Attributes:
      temperature: divisor of the logits; 0 takes the likeliest token.
      top_k: likeliest tokens to draw from; 0 for all.
      top_p: share of the probability of the likeliest tokens to draw from, after
        top_k; 1 for all.
      seed: of the random numbers.

    Raises:
      MeshparError: a value out of range.

    Source: Holtzman et al., The Curious Case of Neural Text Degeneration,
      arXiv:1904.09751, section 3.1 (top-p).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise MeshparError(
                f"temperature={self.temperature}: use 0 for the likeliest token, or a "
                "number above 0"
            )
        if self.top_k < 0:
            raise MeshparError(
                f"top_k={self.top_k}: use 1 or more, or 0 for all tokens"
            )
        if not 0 < self.top_p <= 1:
            raise MeshparError(f"top_p={self.top_p}: use 0 < top_p <= 1")
        if not 0 <= self.seed < 2**32:
            raise MeshparError(f"seed={self.seed}: use 0 to 2**32 - 1")

    def as_arrays(self) -> "SamplingArrays":
        """The values as arguments of a program, which serves all of them."""
        return SamplingArrays(
            jnp.float32(self.temperature),
            jnp.int32(self.top_k),
            jnp.float32(self.top_p),
            jnp.uint32(self.seed),
        )


GREEDY = Sampling()


class SamplingArrays(NamedTuple):
    """The fields of `Sampling` as scalars of a program."""

    temperature: Array
    top_k: Array
    top_p: Array
    seed: Array


def draw(
    logits_BV: Array, sampling: SamplingArrays, sequence_B: Array, position_B: Array
) -> Array:
    """Draws a token of every sequence, int32 [B].

    Args:
      logits_BV: of the tokens to draw, whole along V.
      sampling: how.
      sequence_B: numbers of the sequences, uint32.
      position_B: positions in the sequences that the tokens will have.
    """
    logits_BV = logits_BV.astype(jnp.float32)

    def greedy() -> Array:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    def noisy() -> Array:
        scaled_BV = logits_BV / sampling.temperature
        limited = (sampling.top_k > 0) | (sampling.top_p < 1)
        kept_BV = jax.lax.cond(
            limited, lambda: _likeliest(scaled_BV, sampling), lambda: scaled_BV
        )
        noise_BV = jax.vmap(_noise, (0, 0, None, None))(
            sequence_B, position_B, sampling.seed, logits_BV.shape[-1]
        )
        return jnp.argmax(kept_BV + noise_BV, axis=-1).astype(jnp.int32)

    return jax.lax.cond(sampling.temperature > 0, noisy, greedy)


def _noise(sequence: Array, position: Array, seed: Array, size: int) -> Array:
    """Gumbel noise, with which the largest logit is a sample of their softmax."""
    key = jax.random.fold_in(jax.random.key(seed), sequence)
    return jax.random.gumbel(jax.random.fold_in(key, position), (size,))


def _likeliest(logits_BV: Array, sampling: SamplingArrays) -> Array:
    """The logits of the tokens to draw from, -inf for the others."""
    size = logits_BV.shape[-1]
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    most = jnp.where(sampling.top_k > 0, sampling.top_k, size)
    in_top_k = jnp.arange(size)[None] < most
    share_BV = jax.nn.softmax(jnp.where(in_top_k, sorted_BV, -jnp.inf), axis=-1)
    before_BV = jnp.cumsum(share_BV, axis=-1) - share_BV
    kept_BV = in_top_k & (before_BV < sampling.top_p)
    lowest_B1 = jnp.min(jnp.where(kept_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits_BV >= lowest_B1, logits_BV, -jnp.inf)
