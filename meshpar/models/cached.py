"""Cached models: decoders that keep what they computed of the tokens before.

A model takes part in generation by giving its cache: arrays with a row for each
sequence, and one function that runs new tokens against them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from meshpar.arrays import Array, Params
from meshpar.contracts.declared import DeclaredCollective
from meshpar.layouts.layout import Layout

RunCached = Callable[[Params, Params, Array, Array], tuple[Array, Params]]
"""(params, cache, tokens_BL, positions_BL) -> (logits_BLV, cache)."""
Declare = Callable[[Layout, int, Any], Sequence[DeclaredCollective]]
"""(layout of decoding, batch size, dtype) -> the collectives of one decoded token."""


@dataclasses.dataclass(frozen=True)
class CachedModel:
    """A decoder as a function of its cache.

    Attributes:
      init: (batch_size, length, dtype) -> {path: array}, the empty cache for sequences
        of up to `length` tokens; traced, so that no array is whole on a device.
      names: (path, number of dims) -> dim names of an array of the cache, for the rules
        of activations; None to leave it whole.
      run: (params, cache, tokens_BL, positions_BL) -> (logits_BLV, cache). Token l of a
        row stands at positions_BL[b, l] of its sequence, and sees itself and all
        positions before it. It runs in evaluation mode.
      max_length: most tokens of a sequence; 0 for no limit.
      rows_advance_together: whether all rows must be at the same position, one token at
        a time, as with a cache that holds one index for all of them.
      declare: the collectives of one step; None leaves them to the compiler.
      streams: whether `run` loops over the layers by `ops.over_layers`, so that their
        weights may live in host memory.
    """

    init: Callable[[int, int, Any], Params]
    names: Callable[[str, int], tuple[str | None, ...] | None]
    run: RunCached
    max_length: int = 0
    rows_advance_together: bool = False
    declare: Declare | None = None
    streams: bool = False
