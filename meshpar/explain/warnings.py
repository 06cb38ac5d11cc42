"""Warnings about what is legal and probably not meant."""

import math
from collections.abc import Iterator

from meshpar.contracts.collective import Collective
from meshpar.layouts.axes import FSDP
from meshpar.lowering.program import TrainProgram

SMALL_BYTES, MANY = 2**16, 64
"""Collectives below this, run more often than that, are better combined."""


def collective_warnings(program: TrainProgram) -> Iterator[str]:
    """Warnings about collectives that are too small, or too large."""
    small: dict[tuple, list[Collective]] = {}
    stacked = _stacked_sizes(program)
    for one in program.collectives:
        if one.payload_bytes < SMALL_BYTES:
            small.setdefault((one.kind, one.axes), []).append(one)
        gathered = one.kind == "all_gather" and FSDP in one.axes
        if gathered and one.payload_bytes in stacked:
            yield (
                f"gather of a whole stack of weights, {stacked[one.payload_bytes]}: "
                f"{one.payload_bytes} bytes ({one.source or 'made by the compiler'})"
            )
    for (kind, axes), group in small.items():
        runs = sum(one.executions for one in group)
        if runs > MANY:
            places = sorted({one.source for one in group if one.source})
            yield (
                f"uncombined: {runs} x {kind} over {'*'.join(axes)} of less than "
                f"{SMALL_BYTES} bytes ({', '.join(places[:3])})"
            )


def _stacked_sizes(program: TrainProgram) -> dict[int, str]:
    """{whole bytes on one device: path} of stacks that zero=3 gathers by layer."""
    plan, layered = program.plan, program.model.layered
    if layered is None or layered.depth == 1 or plan.layout.zero_level < 3:
        return {}
    sizes = {}
    for path, leaf in layered.split({**plan.parameters, **plan.weights})[1].items():
        for one in (plan.parameters[path], leaf):
            ways = math.prod(plan.layout.sizes[a] for s in one.spec for a in s)
            sizes[one.bytes_per_device * ways // plan.layout.tensor] = path
    return sizes
