"""Shares of a program's traffic that are declared exactly, bounded, or not at all."""

import dataclasses
import math
from collections.abc import Iterable

from meshpar.contracts import cost
from meshpar.contracts.collective import Collective
from meshpar.contracts.contract import Contract, compared
from meshpar.contracts.slices import over_slices


@dataclasses.dataclass(frozen=True)
class Shares:
    """Bytes that one device sends per run of a program, by how they are declared.

    Attributes:
      exact: declared exactly.
      bounded: beyond that, and held to a bound.
      free: held to nothing, as the compiler chooses them.
      undeclared: beyond the contract.
      why_free: why some are held to nothing; "" if none are.
    """

    exact: float
    bounded: float = 0.0
    free: float = 0.0
    undeclared: float = 0.0
    why_free: str = ""

    @classmethod
    def of(cls, contract: Contract, collectives: Iterable[Collective]) -> "Shares":
        """The shares of a program's collectives.

        Args:
          contract: what the program declares.
          collectives: those of the compiled program.
        """
        exact, rest, collectives = 0.0, [], list(collectives)
        terms, _ = over_slices(contract.terms, collectives)
        for group in compared(terms, collectives):
            found = sum(collective.wire_bytes for collective in group.found)
            known = sum(term.wire_bytes for term in group.terms)
            # Small gathers may be all_reduces: that is known, too.
            moved = max(0, -group.rewritten)
            size = group.found[0].group_size if group.found else 1
            known += cost.wire_bytes("all_reduce", moved, size)
            exact += min(found, known)
            rest.append((group.kind, group.axes, max(0.0, found - known)))
        room = {term: term.wire_bytes for term in terms if term.bound}
        bounds = sorted(room, key=lambda term: (math.isinf(room[term]), len(term.axes)))
        taken = {False: 0.0, True: 0.0}
        undeclared, why = 0.0, {}
        for kind, axes, size in rest:
            for term in bounds:
                if set(axes) <= set(term.axes) and term.kind in ("any", kind):
                    part = min(size, room[term])
                    free = math.isinf(room[term])
                    room[term] -= part
                    taken[free] += part
                    size -= part
                    if free and part:
                        why[f"{'*'.join(term.axes)}, {term.why}"] = None
            undeclared += size
        return cls(exact, taken[False], taken[True], undeclared, "; ".join(why))

    @property
    def total(self) -> float:
        """All bytes that the program moves."""
        return self.exact + self.bounded + self.free + self.undeclared

    @property
    def exactly(self) -> str:
        """The exact share, such as "99.9%"; rounded down."""
        return _percent(self.exact / self.total) if self.total else "100%"

    def __str__(self) -> str:
        if not self.total:
            return "the compiled program moves nothing between devices"
        parts = [
            f"{self.exactly} of the bytes that the compiled program moves were "
            "declared exactly"
        ]
        for size, how in (
            (self.bounded, "held to a bound"),
            (self.free, f"held to nothing ({self.why_free})"),
            (self.undeclared, "not declared"),
        ):
            if size:
                parts.append(f"{_percent(size / self.total)} is {how}")
        if not self.free and not self.undeclared:
            parts.append("nothing more is moved")
        return "; ".join(parts)


def _percent(share: float) -> str:
    """A share in percent, rounded down to tenths."""
    tenths = math.floor(share * 1000 + 1e-9)
    if not tenths:
        return "less than 0.1%" if share else "0%"
    return f"{tenths / 10:.1f}".removesuffix(".0") + "%"
