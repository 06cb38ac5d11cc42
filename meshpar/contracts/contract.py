"""Contracts: the collectives that a layout declares for one step, and the check.

A `Contract` says per collective its kind, mesh axes, how often it runs, its bytes and
why. `violations` holds a compiled program (read by `compiled.read`) to it: reductions
have to be found with exactly their bytes, gathers with no more (a compiler may drop
those that it does not need), bounded terms may take up to theirs, and nothing else may
occur. State is held to its bytes, to the last one.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from meshpar.contracts import cost
from meshpar.contracts.collective import Collective

SMALL_BYTES = 2**20
"""Below this a compiler may spell a gather or reduce_scatter as an all_reduce."""


@dataclasses.dataclass(frozen=True)
class DeclaredCollective:
    """One declared collective.

    Attributes:
      kind: as `compiled.Collective.kind`; "any" for a bound over all kinds.
      axes: mesh axes over which it runs, outer to inner.
      group_size: devices that take part together.
      count: executions per step; 0 where only the bytes are bounded. Compilers may
        combine executions, never add any.
      payload_bytes: bytes of the whole tensors on one device, over all executions.
      why: what it is for.
      bound: whether the bytes are an upper bound on the wire, for axes that the
        compiler handles, and not exact.
      gathers: whether it makes tensors whole, by whatever kind of collective: compilers
        may drop it where nothing reads them, or they are the same in every round.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    count: int
    payload_bytes: int
    why: str
    bound: bool = False
    gathers: bool = False

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends per step; the largest for a bound."""
        if self.kind == "any":
            return float(self.payload_bytes)
        return cost.wire_bytes(self.kind, self.payload_bytes, self.group_size)


@dataclasses.dataclass(frozen=True)
class Contract:
    """What one training step may move between devices, and what each of them keeps.

    Attributes:
      terms: the declared collectives.
      state_bytes: bytes on one device from step to step, by kind, exact.
    """

    terms: tuple[DeclaredCollective, ...]
    state_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def wire_bytes(self) -> float:
        """Bytes that the exact terms put on the wire, per device and step."""
        return sum(term.wire_bytes for term in self.terms if not term.bound)

    def violations(self, found: Iterable[Collective]) -> list[str]:
        """What a compiled program does that the contract does not say, or fails to do.

        Args:
          found: `compiled.read` of the training step.

        Returns:
          One line per violation; empty if the program keeps the contract.
        """
        found, groups = list(found), {}
        for one in found:
            groups.setdefault((one.kind, one.axes), []).append(one)
        declared: dict[tuple, list[DeclaredCollective]] = {}
        for term in self.terms:
            if not term.bound:
                declared.setdefault((term.kind, term.axes), []).append(term)
        room = {term: term.wire_bytes for term in self.terms if term.bound}
        spelled = _spelled_all_reduce(groups, declared)
        problems = []
        for key in [*declared, *(key for key in groups if key not in declared)]:
            group, terms = groups.get(key, []), declared.get(key, [])
            problems += _violations(key, group, terms, room, spelled.get(key, 0))
        return problems

    def state_violations(self, kept: Mapping[str, int]) -> list[str]:
        """Where a compiled program keeps more or less state than was declared.

        Args:
          kept: bytes on one device, by kind.
        """
        return [
            f"{kind}: {kept.get(kind, 0)} bytes kept on a device, {declared} declared"
            for kind, declared in self.state_bytes.items()
            if kept.get(kind, 0) != declared
        ]


def _violations(
    key: tuple[str, tuple[str, ...]],
    group: list[Collective],
    terms: list[DeclaredCollective],
    room: dict[DeclaredCollective, float],
    spelled: int,
) -> list[str]:
    """Holds all collectives of one kind over the same axes to their terms.

    Bytes beyond the exact terms are taken from the room that is left of the bounds.
    `spelled` bytes were found under another kind, or (negative) stand for another.
    """
    kind, axes = key
    want = sum(term.payload_bytes for term in terms)
    got = sum(map(_moved, group)) + spelled
    name = f"{kind} over {'*'.join(axes) or 'no mesh axes'}"
    why = "; ".join(sorted({term.why for term in terms}))
    needed = sum(term.payload_bytes for term in terms if not term.gathers)
    if got < want and (not got or got < needed):
        return [f"{name}: {got} bytes found, {want} declared ({why})"]
    beyond = max(0, got - want)
    size = group[0].group_size if group else 1
    wire = cost.wire_bytes(kind, beyond, size)
    for term in room if beyond else ():
        fits = axes and set(axes) <= set(term.axes) and term.kind in ("any", kind)
        if fits and wire <= room[term]:
            room[term] -= wire
            return []
    if beyond:
        bytes_declared = f"{want} declared ({why})" if terms else "none declared"
        places = ", ".join(sorted({one.source for one in group if one.source}))
        at = f", at {places}" if places else ""
        return [f"{name}: {got} bytes found, {bytes_declared}{at}"]
    executions, count = sum(o.executions for o in group), sum(t.count for t in terms)
    if not spelled and executions > count:
        return [f"{name}: runs {executions} times, declared {count} ({why})"]
    return []


def _spelled_all_reduce(
    groups: dict[tuple, list[Collective]],
    declared: dict[tuple, list[DeclaredCollective]],
) -> dict[tuple, int]:
    """Bytes of small gathers and reduce_scatters that were made all_reduces, by key."""
    spelled: dict[tuple, int] = {}
    for key, group in groups.items():
        kind, axes = key
        if kind != "all_reduce":
            continue
        listed = sum(term.payload_bytes for term in declared.get(key, []))
        small = sum(_moved(one) for one in group if one.payload_bytes <= SMALL_BYTES)
        left = min(small, max(0, sum(map(_moved, group)) - listed))
        for other in (("reduce_scatter", axes), ("all_gather", axes)):
            want = sum(term.payload_bytes for term in declared.get(other, []))
            missing = max(0, want - sum(map(_moved, groups.get(other, []))))
            if 0 < missing <= left:
                spelled[other] = missing
                spelled[key] = spelled.get(key, 0) - missing
                left -= missing
    return spelled


def _moved(one: Collective) -> int:
    return one.payload_bytes * one.executions
