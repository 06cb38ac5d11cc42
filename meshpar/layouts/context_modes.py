"""Ways in which attention runs over sequences that `context` splits."""

from meshpar.errors import LayoutError, nearest, shown
from meshpar.layouts.axes import CONTEXT

ALLGATHER, ULYSSES, RING = "allgather", "ulysses", "ring"

CONTEXT_MODES = (ALLGATHER, ULYSSES, RING)
"""Values of `context_mode=`; the first is the default."""


def check_context_mode(context: int, mode: str, heads: int) -> None:
    """Checks the values of `context_mode=` and `context_heads=`.

    Args:
      context: size of the axis.
      mode: the value of the first.
      heads: the value of the second.

    Raises:
      LayoutError: a mode that does not exist, one without the axis, or neighbours that
        are no part of a ring.
    """
    if mode not in CONTEXT_MODES:
        known = nearest(shown(mode), CONTEXT_MODES)
        raise LayoutError(f"context_mode={shown(mode)!r} ({known})")
    if context == 1 and mode != CONTEXT_MODES[0]:
        raise LayoutError(
            f"context_mode={mode} is for split sequences, and {CONTEXT}=1: add "
            f"{CONTEXT}=N, or leave context_mode out"
        )
    if heads > 1 and mode != RING:
        raise LayoutError(
            f"context_heads={heads} is for rings, and context_mode={mode}: use "
            f"context_mode={RING}, or leave context_heads out"
        )
    if context % heads or heads == context > 1:
        raise LayoutError(
            f"context_heads={heads} does not leave a ring of {CONTEXT}={context} "
            f"devices; use a smaller divisor of {CONTEXT}, or context_mode={ULYSSES}"
        )
