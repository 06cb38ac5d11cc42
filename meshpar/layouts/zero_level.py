"""The option `zero` of a layout.

Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5.
"""

from meshpar.errors import LayoutError


def default_zero(pipe: int, fsdp: int) -> int:
    """The ZeRO level of a layout that states none."""
    return 3 if pipe == 1 or fsdp == 1 else 2


def check_zero(zero: int | None) -> None:
    """Raises LayoutError for a value of `zero=` that does not exist."""
    if zero not in (None, 1, 2, 3):
        raise LayoutError(f"zero={zero!r}: use 1, 2 or 3 (leave fsdp=1 for 0)")
