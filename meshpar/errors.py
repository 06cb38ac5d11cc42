"""Errors that a user can fix, and hints for misspelled names."""

import difflib
from collections.abc import Iterable


class MeshparError(ValueError):
    """A request that cannot be honored; the message gives the values and the remedy.

    Commands print it without a traceback and exit with code 2.
    """


class LayoutError(MeshparError):
    """A layout that cannot be honored, with the tensor, the rule and the remedy."""


class CheckpointError(MeshparError):
    """A checkpoint folder that cannot be used, with the reason and the remedy."""


class StalenessError(MeshparError):
    """An invalid period, staleness or merge, or a violated bound on staleness."""


class ConfigError(MeshparError):
    """A recipe, setting or flag that does not exist or fit, with the remedy."""


class RecipeError(ConfigError):
    """Code of a recipe's file that raises an error, with its line."""


class DataError(MeshparError):
    """Data that are missing, too few, or of another form, with the remedy."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Text for an error message: the known names, and the nearest one to `word`."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"known: {', '.join(known)}{hint}"


def shown(text: str, longest: int = 160) -> str:
    """Shortens a text for an error message."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]}... ({len(text):,} characters)"
