"""Warnings about state and collectives that are legal and probably not meant."""

import itertools
import re
from collections.abc import Iterator

from meshpar.contracts.collective import Collective
from meshpar.layouts.axes import GATHERED_AXES, ways_of
from meshpar.lowering.train_program import TrainProgram

SMALL_BYTES, MANY = 2**16, 64
"""Collectives smaller than this that run more often than that are better combined."""


LARGE_BYTES = 2**20
"""State of at least so many bytes is better split than whole on every device."""


def replicated_state(program: TrainProgram) -> Iterator[str]:
    """Warnings about large variables, no parameters, that are whole on all devices."""
    if not any(program.layout.sizes[axis] > 1 for axis in GATHERED_AXES):
        return
    for path, leaf in program.plan.parameters.items():
        large = leaf.bytes_per_device >= LARGE_BYTES
        if leaf.kind == "state" and large and not any(leaf.spec):
            yield (
                f"{path} {leaf.shape} is whole on every device, "
                f"{leaf.bytes_per_device} bytes each ({leaf.reason}); name its dims in "
                f"the model or with paths.{re.escape(path)}=DIM/DIM"
            )


def collective_warnings(program: TrainProgram) -> Iterator[str]:
    """Warnings about collectives that are too small, or too large."""
    small: dict[tuple, list[Collective]] = {}
    stacked = _stacked_sizes(program)
    for collective in program.collectives:
        size, key = collective.payload_bytes, (collective.kind, collective.axes)
        if size < SMALL_BYTES:
            small.setdefault(key, []).append(collective)
        of_weights = set(GATHERED_AXES) & set(collective.axes)
        if collective.kind == "all_gather" and of_weights and size in stacked:
            source = collective.source or "made by the compiler"
            yield (
                f"gather of a whole stack of weights, {stacked[size]}: {size} bytes "
                f"({source})"
            )
    for (kind, axes), group in small.items():
        runs = sum(collective.executions for collective in group)
        if runs > MANY:
            places = sorted({c.source for c in group if c.source})
            yield (
                f"uncombined: {runs} x {kind} over {'*'.join(axes)} of less than "
                f"{SMALL_BYTES} bytes ({', '.join(places[:3])})"
            )


def _stacked_sizes(program: TrainProgram) -> dict[int, str]:
    """{bytes on one device, gathered: path} of stacks that zero=3 gathers."""
    plan, layered = program.plan, program.model.layered
    if layered is None or layered.depth == 1 or plan.layout.zero_level < 3:
        return {}
    sizes = {}
    for path, weight in layered.split(plan.weights)[1].items():
        for leaf in (plan.parameters[path], weight):
            held = {*itertools.chain(*leaf.held)}
            gathered = {*itertools.chain(*leaf.spec)} - held
            ways = ways_of(gathered, plan.layout.sizes)
            sizes[leaf.bytes_per_device * ways] = path
    return sizes
