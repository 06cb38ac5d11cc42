"""Causal attention masks: the keys that each query sees."""

from typing import NamedTuple

from meshpar.arrays import Array


class Tokens(NamedTuple):
    """Some tokens of every sequence, as queries or as keys.

    Attributes:
      places: their places in whole sequences, integer [L].
      segments: number of the document of each, integer [B, L]; None for one document.
    """

    places: Array
    segments: Array | None = None


def is_seen(queries: Tokens, keys: Tokens, window: int) -> Array:
    """Whether each query sees each key: bool [B, L, M], or [1, L, M].

    A query sees its own token and earlier ones, of its document alone.

    Args:
      queries: L tokens.
      keys: M tokens.
      window: tokens that a query sees, its own among them; 0 for all.
    """
    distance_LM = queries.places[:, None] - keys.places[None]
    seen = (distance_LM >= 0)[None]
    if window:
        seen &= (distance_LM < window)[None]
    if queries.segments is None or keys.segments is None:
        return seen
    return seen & (queries.segments[:, :, None] == keys.segments[:, None])
