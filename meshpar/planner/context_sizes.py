"""Sizes of `context` that follow from two that are traced.

With context_mode=allgather a device sends (n-1)/n of whole keys and values in n-1
steps, and holds 1/n of its own tokens. Other modes follow no such rule: heads may not
divide, and rings run in steps of their own.
"""

from meshpar.layouts.context_modes import ALLGATHER
from meshpar.layouts.layout import Layout

TRACED_CONTEXTS = 2, 4
"""Sizes of `context` from which those of larger ones follow."""


def follows(exchange: Layout) -> bool:
    """Whether a size of `context` follows from smaller ones that are traced."""
    gathers = exchange.context_mode == ALLGATHER
    return gathers and exchange.context > max(TRACED_CONTEXTS)


def by_steps(few: float, many: float, exchange: Layout) -> float:
    """A value that is constant or grows with the steps of a ring."""
    low, high = TRACED_CONTEXTS
    return few + (many - few) * (exchange.context - low) / (high - low)


def by_parts(few: float, many: float, exchange: Layout) -> float:
    """A value that is constant or in proportion to a device's part of a sequence."""
    low, high = TRACED_CONTEXTS
    part = (few - many) / (1 / low - 1 / high)
    return few + part * (1 / exchange.context - 1 / low)
