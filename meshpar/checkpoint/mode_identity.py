"""Identities of optimizer modes in checkpoints: state is reused under an equal mode."""

from collections.abc import Mapping
from typing import Any

EXTRA, MODE = "synchronization", "mode"
"""Keys in metadata: of the record of extra state, and of the mode's identity in it."""


def unsaid_settings(metadata: Mapping[str, Any], identity: str) -> str | None:
    """The end of a mode's identity that a checkpoint of an earlier version lacks.

    Later versions of a mode add settings at the end of its identity. The identity that
    an earlier version saved is therefore the beginning of today's.

    Args:
      metadata: of the checkpoint; the first format names no mode.
      identity: that of the run's mode.

    Returns:
      The end that the saved identity lacks, "" for equal ones; None for another mode.
    """
    saved = metadata.get(EXTRA, {MODE: ""})[MODE]
    if saved == identity:
        return ""
    start = f"{saved}, "
    return identity.removeprefix(start) if identity.startswith(start) else None
