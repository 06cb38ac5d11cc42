"""Contracts: declared collectives of a step against the compiled program.

A `Contract` lists the declared collectives with kind, mesh axes, executions, bytes and
purpose. `Contract.violations` compares them with the collectives of a compiled program
(`parse_hlo`):
- Reductions must be found with exactly their bytes.
- Gathers must be found with their bytes or fewer, as a compiler may drop those that it
  does not need.
- Bounds may be used up to their bytes; collectives over parts of an axis count against
  them alone.
- All_reduces that cross slices of TPUs are held to a range (`slices`).
- No other collective may occur.
The bytes of the state must be exact as well. On CPUs no collective may run among those
of a loop (`loop_order`).
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from meshpar.contracts.collective import Collective
from meshpar.contracts.declared import DeclaredCollective
from meshpar.contracts.host_transfers import HostTransfer
from meshpar.contracts.slices import over_slices

SMALL_BYTES = 2**20
"""A compiler may write a gather or reduce_scatter up to this size as an all_reduce."""


_REPEATED = ".remat"
"""Part of the names of operations that compilers run again to save memory."""

_TOO_LITTLE_MEMORY = (
    "; the compiler runs {} of them again, because the device has too little memory: "
    "use more rematerialization, more microbatches or more devices"
)


@dataclasses.dataclass(frozen=True)
class Contract:
    """The collectives of one training step, and the bytes of its state.

    Attributes:
      terms: the declared collectives.
      state_bytes: exact bytes of the training state on one device, by kind such as
        "parameters".
      host: transfers between one device and host memory.
    """

    terms: tuple[DeclaredCollective, ...]
    state_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    host: tuple[HostTransfer, ...] = ()

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends per step, without bounds."""
        return sum(term.wire_bytes for term in self.terms if not term.bound)

    def violations(self, collectives: Iterable[Collective]) -> list[str]:
        """Compares the collectives of a compiled program with the declared ones.

        Args:
          collectives: `parse_hlo` of the training step.

        Returns:
          One line per violation; empty if the program keeps the contract.
        """
        collectives = list(collectives)
        all_terms, lines = over_slices(self.terms, collectives)
        room = {term: term.wire_bytes for term in all_terms if term.bound}
        for group in compared(all_terms, collectives):
            lines += _violations(group, room)
        return lines

    def state_violations(self, state_bytes: Mapping[str, int]) -> list[str]:
        """Compares the state of a compiled program with the declared bytes.

        Args:
          state_bytes: bytes on one device, by kind.

        Returns:
          One line per kind whose bytes differ.
        """
        return [
            f"{kind}: {state_bytes.get(kind, 0)} bytes on a device, {declared} declared"
            for kind, declared in self.state_bytes.items()
            if state_bytes.get(kind, 0) != declared
        ]


_Key = tuple[str, tuple[str, ...], bool]
"""Kind and mesh axes of collectives that are compared together, and `partial`."""


class Compared(NamedTuple):
    """All collectives of one kind over the same axes, and their exact terms.

    Attributes:
      kind: as `Collective.kind`.
      axes: mesh axes.
      partial: whether the groups of devices are parts of the axes.
      found: the collectives of the program.
      terms: the declared collectives that are exact.
      rewritten: bytes of this kind that occur as another kind, or minus the bytes of
        other kinds that occur as this one.
    """

    kind: str
    axes: tuple[str, ...]
    partial: bool
    found: list[Collective]
    terms: list[DeclaredCollective]
    rewritten: int


def compared(
    terms: Iterable[DeclaredCollective], collectives: Iterable[Collective]
) -> list[Compared]:
    """Puts collectives beside the exact terms of the same kind and axes.

    Args:
      terms: of a contract.
      collectives: of a compiled program.
    """
    groups: dict[_Key, list[Collective]] = {}
    for collective in collectives:
        key = collective.kind, collective.axes, collective.partial
        groups.setdefault(key, []).append(collective)
    declared: dict[_Key, list[DeclaredCollective]] = {}
    for term in terms:
        if not term.bound:
            key = term.kind, term.axes, term.partial
            declared.setdefault(key, []).append(term)
    rewritten = _written_as_all_reduce(groups, declared)
    return [
        Compared(
            *key, groups.get(key, []), declared.get(key, []), rewritten.get(key, 0)
        )
        for key in [*declared, *(key for key in groups if key not in declared)]
    ]


def _violations(compared: Compared, room: dict[DeclaredCollective, float]) -> list[str]:
    """Compares all collectives of one kind over the same axes with their terms.

    Args:
      compared: both.
      room: bytes that are left of each bound; bytes beyond the terms are taken from it.
    """
    kind, axes, partial, group, terms, rewritten = compared
    declared = sum(term.payload_bytes for term in terms)
    actual = sum(map(_payload, group)) + rewritten
    name = f"{kind} over {'part of ' if partial else ''}{'*'.join(axes)}"
    why = "; ".join(sorted({term.why for term in terms}))
    needed = sum(term.payload_bytes for term in terms if not term.gathers)
    if actual < declared and (not actual or actual < needed):
        return [f"{name}: {actual} bytes found, {declared} declared ({why})"]
    excess = max(0, actual - declared)
    if excess:
        wire = sum(c.wire_bytes for c in group) * excess / sum(map(_payload, group))
        if _takes(room, kind, axes, wire):
            return []
        bytes_declared = f"{declared} declared ({why})" if terms else "none declared"
        sources = ", ".join(sorted({c.source for c in group if c.source}))
        at = f", at {sources}" if sources else ""
        again = _runs([c for c in group if _REPEATED in c.name])
        of_memory = _TOO_LITTLE_MEMORY.format(again) if again else ""
        return [f"{name}: {actual} bytes found, {bytes_declared}{at}{of_memory}"]
    executions, count = _runs(group), sum(t.count for t in terms)
    # Fewer bytes than declared leave place for small collectives of a bound.
    extra = max(0, executions - count)
    if rewritten or _takes(room, kind, axes, _least_bytes(group, extra)):
        return []
    return [f"{name}: runs {executions} times, declared {count} ({why})"]


def _takes(
    room: dict[DeclaredCollective, float],
    kind: str,
    axes: tuple[str, ...],
    wire_bytes: float,
) -> bool:
    """Whether bounds have room for some bytes; takes the bytes from them if so.

    Bounds over few axes come first: others leave room for what runs over more axes.
    """
    fitting = [
        term
        for term in room
        if set(axes) <= set(term.axes) and term.kind in ("any", kind)
    ]
    if wire_bytes > sum(room[term] for term in fitting):
        return False
    for term in sorted(fitting, key=lambda term: len(term.axes)):
        taken = min(wire_bytes, room[term])
        room[term] -= taken
        wire_bytes -= taken
    return True


def _least_bytes(group: list[Collective], runs: int) -> float:
    """Bytes that one device sends in the smallest runs of a group."""
    total = 0.0
    for collective in sorted(group, key=lambda c: c.payload_bytes):
        taken = min(runs, collective.executions)
        total += taken * collective.wire_bytes / collective.executions
        runs -= taken
    return total


def _written_as_all_reduce(
    groups: dict[_Key, list[Collective]],
    declared: dict[_Key, list[DeclaredCollective]],
) -> dict[_Key, int]:
    """Bytes of small gathers and reduce_scatters that occur as all_reduces, by key.

    Of gathers that a compiler may drop, some may be gone and others be all_reduces:
    then those all_reduces run at most as often as the gathers that are missing.
    """
    rewritten: dict[_Key, int] = {}
    for key, group in groups.items():
        kind, axes, partial = key
        if kind != "all_reduce" or partial:
            continue
        expected = sum(term.payload_bytes for term in declared.get(key, []))
        runs = _runs(group) - sum(term.count for term in declared.get(key, []))
        small = sum(_payload(c) for c in group if c.payload_bytes <= SMALL_BYTES)
        left = min(small, max(0, sum(map(_payload, group)) - expected))
        for other in (("reduce_scatter", axes, False), ("all_gather", axes, False)):
            terms = declared.get(other, [])
            missing = sum(term.payload_bytes for term in terms)
            missing -= sum(map(_payload, groups.get(other, [])))
            missing_runs = sum(term.count for term in terms)
            missing_runs -= _runs(groups.get(other, []))
            if runs <= missing_runs and all(term.gathers for term in terms):
                missing = min(missing, left)
            if 0 < missing <= left:
                rewritten[other] = missing
                rewritten[key] = rewritten.get(key, 0) - missing
                left -= missing
    return rewritten


def _runs(group: list[Collective]) -> int:
    """Sum of the executions of a group's collectives."""
    return sum(collective.executions for collective in group)


def _payload(collective: Collective) -> int:
    """Bytes of the whole tensors, over all executions."""
    return collective.payload_bytes * collective.executions
