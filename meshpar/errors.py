"""Errors that a user can mend, and how they name what exists."""

import difflib
from collections.abc import Iterable


class MeshparError(ValueError):
    """Something asked for cannot be done; the message gives values and the remedy.

    Programs print it without a traceback and exit with code 2.
    """


class LayoutError(MeshparError):
    """A layout that cannot be honoured, with the tensor, the rule and the remedy."""


class CheckpointError(MeshparError):
    """A checkpoint folder that cannot be used, with the reason and the remedy."""


class StalenessError(MeshparError):
    """A period, staleness or merge that cannot be meant, or a bound that broke."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Names what exists and the nearest match, for error messages."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"known: {', '.join(known)}{hint}"
