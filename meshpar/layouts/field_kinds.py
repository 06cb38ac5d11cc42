"""Kinds and ranges of the fields of a layout, each by itself."""

from collections.abc import Mapping
from typing import Any

from meshpar.errors import LayoutError
from meshpar.layouts.axes import AXES

MAX_SIZE = 2**20
"""Largest size of an axis, and most microbatches and virtual stages."""


def check_kinds(layout: Any, defaults: Mapping[str, Any]) -> None:
    """Checks sizes, and texts for being texts.

    Args:
      layout: a layout.
      defaults: {name: default} of every field.

    Raises:
      LayoutError: a size out of range, or a text that is none.
    """
    counts = "microbatches", "virtual_stages", "context_heads", "scan_unroll"
    least = dict.fromkeys((*AXES, *counts), 1)
    for name, low in {**least, "min_shard_size": 0}.items():
        size = getattr(layout, name)
        whole = isinstance(size, int) and not isinstance(size, bool)
        if not whole or size < low:
            raise LayoutError(f"{name}={size!r}: use a whole number of at least {low}")
        if low and size > MAX_SIZE:
            raise LayoutError(f"{name}={size}: use at most {MAX_SIZE:,}")
    for name, default in defaults.items():
        if isinstance(default, str) and not isinstance(getattr(layout, name), str):
            raise LayoutError(
                f"{name}={getattr(layout, name)!r}: use a text, such as {default!r}"
            )
