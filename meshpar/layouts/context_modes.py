"""Ways in which attention runs over sequences that `context` splits."""

from meshpar.errors import LayoutError, nearest, shown

ALLGATHER, ULYSSES, RING = "allgather", "ulysses", "ring"

CONTEXT_MODES = (ALLGATHER, ULYSSES, RING)
"""Values of `context_mode=`; the first is the default."""


def check_context_mode(mode: str) -> None:
    """Raises LayoutError for a value of `context_mode=` that does not exist."""
    if mode not in CONTEXT_MODES:
        known = nearest(shown(mode), CONTEXT_MODES)
        raise LayoutError(f"context_mode={shown(mode)!r} ({known})")
