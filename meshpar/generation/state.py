"""The state of generation between two tokens, and its update."""

from typing import NamedTuple

import jax.numpy as jnp

from meshpar.arrays import Array, Params
from meshpar.generation.sampling import SamplingArrays, draw


class GenerationState(NamedTuple):
    """Sequences that are being generated; M slots each.

    Attributes:
      cache: {path: array} of the tokens before `position`.
      tokens: int32 [B, M], prompts and what was generated; 0 behind them.
      position: int32 [B], of the token that runs next.
      length: int32 [B], number of tokens so far.
      limit: int32 [B], number of tokens at which a sequence is complete.
      done: bool [B], whether it is complete.
      sequence: uint32 [B], number of each sequence, for random numbers.
      dropped: int32 [B], tokens of each sequence before the first slot.
      stops: bool [V], the tokens that complete a sequence.
    """

    cache: Params
    tokens: Array
    position: Array
    length: Array
    limit: Array
    done: Array
    sequence: Array
    dropped: Array
    stops: Array


def current_tokens(state: GenerationState) -> Array:
    """The token of every sequence that runs next, int32 [B]."""
    at_BM = jnp.arange(state.tokens.shape[1])[None] == state.position[:, None]
    return jnp.sum(jnp.where(at_BM, state.tokens, 0), axis=1)


def advanced(
    state: GenerationState,
    cache: Params,
    logits_BV: Array,
    sampling: SamplingArrays,
    together: bool,
) -> GenerationState:
    """The state after the current tokens ran.

    A sequence whose prompt goes on keeps its own next token. A stop token completes a
    sequence and is not kept.

    Args:
      state: before.
      cache: with the current tokens.
      logits_BV: for the next tokens.
      sampling: how they are drawn.
      together: whether complete sequences advance as well (`CachedModel`).
    """
    place_B = state.position + 1
    absolute_B = state.dropped + place_B
    drawn_B = draw(logits_BV, sampling, state.sequence, absolute_B)
    draws_B = (place_B >= state.length) & ~state.done
    stops_B = draws_B & state.stops[drawn_B]
    writes_B = draws_B & ~stops_B
    at_BM = jnp.arange(state.tokens.shape[1])[None] == place_B[:, None]
    length_B = jnp.where(writes_B, place_B + 1, state.length)
    done_B = state.done | stops_B | (length_B >= state.limit)
    return state._replace(
        cache=cache,
        tokens=jnp.where(at_BM & writes_B[:, None], drawn_B[:, None], state.tokens),
        position=place_B if together else jnp.where(done_B, state.position, place_B),
        length=length_B,
        done=done_B,
    )
