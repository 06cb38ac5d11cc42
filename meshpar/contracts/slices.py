"""The contract of all_reduces in programs over several slices.

A compiler writes an all_reduce that crosses slices as several collectives: the devices
of one slice reduce, slices exchange the sums or parts of them, and the devices of one
slice gather. It pads what slices exchange to whole tiles. So the bytes of these
all_reduces are held to a range, and not exact.
"""

from collections.abc import Iterator, Sequence

from meshpar.contracts.collective import Collective
from meshpar.contracts.declared import DeclaredCollective

_PADDED = 1.5
"""Most bytes that are exchanged, over those of the tensors."""

_TILE_BYTES = 4096
"""Bytes to which a small tensor is padded."""


def over_slices(
    terms: Sequence[DeclaredCollective], collectives: Sequence[Collective]
) -> tuple[list[DeclaredCollective], list[str]]:
    """Replaces exact all_reduces that cross slices by bounds on their exchanges.

    Args:
      terms: the declared collectives.
      collectives: those of the compiled program.

    Returns:
      The terms, in which bounds stand for all exact all_reduces that cross slices, and
      one line if slices exchange less than these need.
    """
    across = [c for c in collectives if c.between_slices and c.kind == "all_reduce"]
    if not across:
        return list(terms), []
    axes = {axis for c in across for axis in c.axes}
    slices = max(c.group_size for c in across)
    kept, crossing = [], []
    for term in terms:
        exact = term.kind == "all_reduce" and not term.bound
        (crossing if exact and axes & set(term.axes) else kept).append(term)
    needed = sum(t.payload_bytes * slices // t.group_size for t in crossing)
    found = sum(c.payload_bytes * c.executions for c in across)
    why = "; ".join(sorted({term.why for term in crossing}))
    lines = []
    if found < needed:
        lines = [
            f"all_reduce between slices: {found} bytes found, at least {needed} "
            f"declared ({why})"
        ]
    kept += _bounds(crossing, tuple(axes), slices, why)
    return kept, lines


def _bounds(
    terms: Sequence[DeclaredCollective], axes: tuple[str, ...], slices: int, why: str
) -> Iterator[DeclaredCollective]:
    """Bounds on the bytes of some terms: between slices, and inside of each.

    Args:
      terms: exact all_reduces that cross slices.
      axes: those along which slices exchange.
      slices: number of slices.
      why: purpose of the terms.
    """
    if terms:
        size = sum(map(_padded_bytes, terms))
        yield DeclaredCollective("all_reduce", axes, slices, 0, size, why, bound=True)
    for term in terms:
        if (inside := term.group_size // slices) > 1:
            for kind in ("all_reduce", "reduce_scatter", "all_gather"):
                size = _padded_bytes(term)
                yield DeclaredCollective(
                    kind, term.axes, inside, 0, size, term.why, bound=True
                )


def _padded_bytes(term: DeclaredCollective) -> int:
    """Most bytes that a compiler moves for the tensors of a term."""
    return int(_PADDED * term.payload_bytes) + _TILE_BYTES * term.count
