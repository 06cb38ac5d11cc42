"""What a contract asks of the all_reduces of programs over several slices.

A compiler writes an all_reduce that crosses slices as several collectives: the devices
of one slice reduce, slices exchange the sums or parts of them, and the devices of one
slice gather. It pads what slices exchange to whole tiles. So the bytes of these
all_reduces are held to a range, and not exact.
"""

from collections.abc import Sequence

from meshpar.contracts import cost
from meshpar.contracts.collective import Collective
from meshpar.contracts.declared import DeclaredCollective

_PADDED = 1.5
"""Most bytes that are exchanged, over those of the tensors."""

_TILE_BYTES = 4096
"""Bytes to which a small tensor is padded."""


def over_slices(
    terms: Sequence[DeclaredCollective], collectives: Sequence[Collective]
) -> tuple[list[DeclaredCollective], list[str]]:
    """The declared collectives as the slices of a program exchange them.

    Args:
      terms: the declared collectives.
      collectives: those of the compiled program.

    Returns:
      The terms, in which one bound stands for all exact all_reduces that cross slices,
      and one line if slices exchange less than these need.
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
    if crossing:
        every = {axis: None for term in crossing for axis in term.axes}
        size = sum(_most_bytes(term, slices) for term in crossing)
        group = max(term.group_size for term in crossing)
        bound = DeclaredCollective("any", (*every,), group, 0, size, why, bound=True)
        kept.append(bound)
    return kept, lines


def _most_bytes(term: DeclaredCollective, slices: int) -> int:
    """Bytes that one device sends at most for an all_reduce over slices."""
    size = int(_PADDED * term.payload_bytes) + _TILE_BYTES * term.count
    inside = term.group_size // slices
    sent = cost.wire_bytes("all_reduce", size, slices)
    for kind in ("all_reduce", "all_gather"):
        sent += cost.wire_bytes(kind, size, inside)
    return int(sent)
