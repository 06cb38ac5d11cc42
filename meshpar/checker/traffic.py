"""Rows of a report: collectives of one kind, line and pass together."""

import dataclasses
from collections.abc import Iterable

from meshpar.checker.facts import Move
from meshpar.units import readable_bytes


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives that one line of a step asks for.

    Attributes:
      kind: all_reduce, all_gather, reduce_scatter, all_to_all, permute, broadcast.
      axes: mesh axes, outer to inner.
      phase: forward, backward or update.
      line: "file:line" of the user's code; "" if unknown.
      path: scopes around the first of them.
      runs: per step.
      wire_bytes: that one device sends per step.
      exposed_bytes: those with no compute beside them.
    """

    kind: str
    axes: tuple[str, ...]
    phase: str
    line: str
    path: str
    runs: int
    wire_bytes: float
    exposed_bytes: float

    @property
    def key(self) -> tuple:
        """The key by which rows of two reports are the same; lines may have moved."""
        return self.kind, self.axes, self.phase, self.path or self.line.split(":")[0]

    @property
    def cells(self) -> tuple[str, ...]:
        """Its cells in a table."""
        hidden = self.wire_bytes - self.exposed_bytes
        beside = f"{readable_bytes(hidden)} hidden" if hidden else ""
        return (
            readable_bytes(self.wire_bytes),
            f"{self.runs} x {self.kind}",
            "*".join(self.axes),
            self.phase,
            beside,
            self.path,
            self.line,
        )

    def __str__(self) -> str:
        return "  ".join(filter(None, self.cells))


def rows(moves: Iterable[Move]) -> list[Row]:
    """The rows of a step's collectives, the largest first."""
    groups: dict[tuple, list[Move]] = {}
    for move in moves:
        key = move.kind, move.axes, move.phase, move.line
        groups.setdefault(key, []).append(move)
    found = [
        Row(
            *key,
            path=own[0].path,
            runs=sum(move.collective.executions for move in own),
            wire_bytes=sum(move.wire_bytes for move in own),
            exposed_bytes=sum(
                move.wire_bytes for move in own if not move.collective.overlapped
            ),
        )
        for key, own in groups.items()
    ]
    return sorted(found, key=lambda row: -row.wire_bytes)


def by_key(rows: Iterable[Row]) -> dict[tuple, tuple[int, float]]:
    """{key of rows: (runs, bytes)} of all rows that have it."""
    found: dict[tuple, tuple[int, float]] = {}
    for row in rows:
        runs, size = found.get(row.key, (0, 0.0))
        found[row.key] = runs + row.runs, size + row.wire_bytes
    return found
