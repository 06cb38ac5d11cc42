"""The options `zero` and `prefetch` of a layout, and what they need.

Source: Rajbhandari et al., ZeRO, arXiv:1910.02054, section 5.
"""

from collections.abc import Sequence

from meshpar.errors import LayoutError


def default_zero(pipe: int, fsdp: int) -> int:
    """The ZeRO level of a layout that states none."""
    return 3 if pipe == 1 or fsdp == 1 else 2


def check_zero(zero: int | None, fsdp: int) -> None:
    """Raises LayoutError for a value of `zero=` that does not exist or does nothing."""
    if zero not in (None, 1, 2, 3):
        raise LayoutError(f"zero={zero!r}: use 1, 2 or 3 (leave fsdp=1 for 0)")
    if zero in (1, 2) and fsdp == 1:
        raise LayoutError(
            f"zero={zero} shards over the fsdp axis, which has size 1; "
            f"use fsdp=N,zero={zero} in place of data=N"
        )


def check_prefetch(prefetch: Sequence[str], zero_level: int, fsdp: int) -> None:
    """Raises LayoutError for a prefetch of weights that no layer gathers.

    Args:
      prefetch: regexes of parameters.
      zero_level: the ZeRO level in force.
      fsdp: size of the axis.
    """
    if prefetch and (zero_level != 3 or fsdp == 1):
        raise LayoutError(
            f"prefetch={prefetch[0]} gathers weights one layer ahead, but "
            f"fsdp={fsdp},zero={zero_level} gathers none layer by layer; "
            "use fsdp=N,zero=3, or leave it out"
        )
