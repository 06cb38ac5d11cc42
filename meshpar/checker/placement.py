"""Rules of arguments: replicated arrays, idle axes, buffers that are not donated."""

import collections
import math
from collections.abc import Iterator

from meshpar.checker.facts import Facts
from meshpar.checker.finding import CALL, MEMORY, Finding
from meshpar.checker.leaves import Leaf
from meshpar.checker.lines import definition, first_line, made_line

_MOST = 0.5
"""Share of the bytes of other arrays that an axis splits, from which it should split an
array, too."""

_PURE_COPIES = 10**9
"""Bytes of a state that nothing splits, from which that is a finding: data parallelism
replicates small models on purpose."""


def replicated(facts: Facts) -> Iterator[Finding]:
    """Arrays of the state that are whole along an axis that splits the others."""
    known = [leaf for leaf in facts.state if leaf.dims is not None]
    if facts.num_devices > 1 and not any(leaf.axes for leaf in known):
        yield from _all_copies(facts, known)
    for leaf in known:
        missing = tuple(_that_divide(facts, leaf, _usual(facts, known, leaf)))
        if missing:
            ways = math.prod(facts.mesh[axis] for axis in missing)
            axes = "*".join(missing)
            yield Finding(
                f"{leaf.name} {leaf.dtype}{list(leaf.shape)} is whole along {axes}, "
                "which splits most of the state",
                f"give {leaf.name} a PartitionSpec with {axes}: a device then holds "
                f"1/{ways} of it",
                leaf.bytes - leaf.bytes // ways,
                MEMORY,
                missing,
                first_line(facts, leaf),
            )


def _usual(facts: Facts, state: list[Leaf], leaf: Leaf) -> list[str]:
    """The axes that split most of the state, beside an array and those of its shape."""
    others = [other for other in state if other.shape != leaf.shape]
    # The moments of a weight have its shape: they are no other arrays, unless all have.
    others = others or [other for other in state if other is not leaf]
    total = sum(other.whole_bytes for other in others)
    split: collections.Counter[str] = collections.Counter()
    for other in others:
        for axis in other.axes:
            split[axis] += other.whole_bytes
    usual = [axis for axis in facts.mesh if split[axis] > _MOST * total]
    return [axis for axis in usual if axis not in leaf.axes]


def _that_divide(facts: Facts, leaf: Leaf, axes: list[str]) -> Iterator[str]:
    """The axes that could split a dim of an array beside those that split it."""
    left = [
        size // math.prod(facts.mesh[axis] for axis in dim)
        for size, dim in zip(leaf.shape, leaf.dims, strict=True)
    ]
    for axis in axes:
        for place, size in enumerate(left):
            if size > 1 and size % facts.mesh[axis] == 0:
                left[place] //= facts.mesh[axis]
                yield axis
                break


def _all_copies(facts: Facts, state: list[Leaf]) -> Iterator[Finding]:
    """A large state that nothing splits."""
    size = sum(leaf.bytes for leaf in state)
    if size >= _PURE_COPIES:
        axes = tuple(a for a in facts.mesh if facts.mesh[a] > 1)
        groups = ", ".join(dict.fromkeys(leaf.group for leaf in state))
        spent = size - size // facts.num_devices
        yield Finding(
            f"every device holds all of {groups}",
            "split parameters and optimizer state over the axis of the batch (FSDP, "
            "ZeRO)",
            spent,
            MEMORY,
            axes,
            definition(facts),
        )


def idle_axis(facts: Facts) -> Iterator[Finding]:
    """Mesh axes along which all devices do the same."""
    used = {axis for move in facts.moves for axis in move.axes}
    used |= {axis for leaf in facts.leaves for axis in leaf.axes}
    known = facts.leaves and all(leaf.dims is not None for leaf in facts.leaves)
    for axis, size in facts.mesh.items():
        if known and size > 1 and axis not in used:
            yield Finding(
                f"axis {axis!r} splits no argument and no collective runs over it: its "
                f"{size} devices compute the same",
                f"split the batch or the weights over {axis}, or leave it out",
                of=CALL,
                axes=(axis,),
                line=definition(facts),
            )


def donation(facts: Facts) -> Iterator[Finding]:
    """Memory that the step could write its results into, and does not."""
    lost = [x for x in facts.leaves if x.donated and not x.aliased and x.shape]
    kept = [x for x in facts.state if not x.donated and x.shape]
    following = {id(leaf): result for leaf, result in facts.returned}
    for leaves, what, remedy in (
        (
            lost,
            "donated, and no result takes over its memory",
            "return an array of its shape, dtype and sharding, or do not donate it",
        ),
        (
            kept,
            "returned anew, and its memory is not donated",
            "jax.jit(step, donate_argnums=...): results are written over arguments",
        ),
    ):
        for group in dict.fromkeys(leaf.group for leaf in leaves):
            own = [leaf for leaf in leaves if leaf.group == group]
            largest = max(own, key=lambda leaf: leaf.bytes)
            line = definition(facts)
            if leaves is lost:  # The next value has another type, or there is none.
                result = following.get(id(largest))
                made = made_line(facts, result) if result is not None else ""
                line = made or first_line(facts, largest)
            others = f" and {len(own) - 1} more of {group}" if len(own) > 1 else ""
            yield Finding(
                f"{largest.name} {largest.dtype}{list(largest.shape)}{others}: {what}",
                remedy,
                sum(leaf.bytes for leaf in own),
                MEMORY,
                line=line,
            )
