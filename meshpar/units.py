"""Units of bytes and seconds for tables and plots."""

import math

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def unit_of_bytes(size: float) -> tuple[float, str]:
    """The largest unit that is at most `size`: (its bytes, its name)."""
    return next((unit for unit in _UNITS if size >= unit[0]), (1.0, "B"))


def readable_bytes(size: float) -> str:
    """Bytes in the unit that fits, such as "1.25 MB"."""
    if math.isinf(size):
        return "unbounded"
    scale, name = unit_of_bytes(size)
    return f"{size / scale:.2f} {name}" if scale > 1 else f"{size:.0f} {name}"


def readable_seconds(seconds: float) -> str:
    """Seconds in the unit that fits, such as "12.3 ms"."""
    if 0 < seconds < 1e-3:
        return f"{1e6 * seconds:.1f} µs"
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.1f} ms"
