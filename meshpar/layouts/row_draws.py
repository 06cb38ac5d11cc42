"""Random numbers of a loss: which of them belong to rows of the batch."""

from typing import NamedTuple


class Draws(NamedTuple):
    """Draws that belong to rows, by the size of their first dim.

    All other draws are the same in every part of the batch.

    Attributes:
      rows: numbers of entries per row, of draws; None for any number.
      keys: numbers of entries per row, of keys that are split.
    """

    rows: frozenset[int] | None = None
    keys: frozenset[int] = frozenset()
