"""Ways in which attention runs over sequences that `context` splits."""

from meshpar.errors import LayoutError, nearest, shown
from meshpar.layouts.axes import CONTEXT

ALLGATHER, ULYSSES, RING = "allgather", "ulysses", "ring"

CONTEXT_MODES = (ALLGATHER, ULYSSES, RING)
"""Values of `context_mode=`; the first is the default."""


def check_context_mode(context: int, mode: str) -> None:
    """Checks the value of `context_mode=`.

    Args:
      context: size of the axis.
      mode: the value.

    Raises:
      LayoutError: a mode that does not exist, or one without the axis.
    """
    if mode not in CONTEXT_MODES:
        known = nearest(shown(mode), CONTEXT_MODES)
        raise LayoutError(f"context_mode={shown(mode)!r} ({known})")
    if context == 1 and mode != CONTEXT_MODES[0]:
        raise LayoutError(
            f"context_mode={mode} is for split sequences, and {CONTEXT}=1: add "
            f"{CONTEXT}=N, or leave context_mode out"
        )
