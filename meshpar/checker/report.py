"""The report of a check: findings first, then collectives, memory and tensors."""

import dataclasses
import functools
import html
import re
from collections.abc import Iterator, Sequence

from meshpar import html_page
from meshpar.checker.equality import Equality
from meshpar.checker.facts import Facts, Move
from meshpar.checker.finding import CALL, TRAFFIC, Finding
from meshpar.checker.memory import Peak, peak
from meshpar.checker.rules import RULES
from meshpar.checker.traffic import by_key, rows
from meshpar.contracts import cost
from meshpar.errors import MeshparError, nearest
from meshpar.units import readable_bytes

_MOST = 12
"""Rows of a table of the report."""

_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9}
_WANTED = re.compile(
    r"(?P<name>\w+)(?: over (?P<axes>[\w*]+))?"
    r"(?: ?> ?(?P<size>[\d.]+) ?(?P<unit>[kMG]?B)?)?"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """The findings and facts of a check.

    Attributes:
      facts: of the compiled step.
      all_findings: also those below the threshold.
      threshold: a share of the bytes of traffic or memory, below 1; else bytes.
      equality: the comparison with the step on other devices; None without one.
    """

    facts: Facts
    all_findings: tuple[Finding, ...]
    threshold: float = 0.01
    equality: Equality | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings above the threshold, the largest first."""
        return tuple(x for x in self.all_findings if self._counts(x))

    def _counts(self, finding: Finding) -> bool:
        if finding.of == CALL:
            return True
        if self.threshold >= 1:
            return finding.size >= self.threshold
        traffic = finding.of == TRAFFIC
        whole = self.facts.wire_bytes if traffic else self.facts.memory_bytes
        return finding.size > self.threshold * whole

    @property
    def collectives(self) -> tuple[Move, ...]:
        """The collectives of the step, in the order of the program."""
        return self.facts.moves

    @functools.cached_property
    def memory(self) -> Peak:
        """The tensors in memory at the peak, by the order of the program."""
        return peak(self.facts)

    @property
    def exposed_bytes(self) -> float:
        """Bytes that one device sends with no compute scheduled beside them."""
        return sum(
            move.wire_bytes
            for move in self.facts.moves
            if not move.collective.overlapped
        )

    def assert_no(self, *wanted: str) -> None:
        """Raises AssertionError if the step has what it must not have.

        Args:
          *wanted: a rule such as "reshard", a kind of collectives such as "all_gather",
            or "any" for all rules; each also with axes and a least size of one of them:
            "all_gather over tensor", "replicated>10MB".

        Raises:
          AssertionError: it has some; with their sizes and lines.
          MeshparError: there is no such rule or kind.
        """
        problems = [line for text in wanted for line in self._having(text)]
        if problems:
            raise AssertionError("\n".join(problems))

    def _having(self, text: str) -> Iterator[str]:
        """One line for each thing that a word of `assert_no` forbids."""
        if not (match := _WANTED.fullmatch(text.strip())):
            raise MeshparError(
                f"{text!r}: write 'reshard', 'all_gather over axis>10MB'"
            )
        name, axes, size, unit = match.group("name", "axes", "size", "unit")
        over = set(axes.split("*")) if axes else set()
        if unknown := over - set(self.facts.mesh):
            axis = min(unknown)
            raise MeshparError(f"no axis {axis!r}: {nearest(axis, self.facts.mesh)}")
        least = float(size) * _UNITS[(unit or "").lower()] if size else 0.0
        if name in cost.KINDS:
            for row in rows(self.facts.moves):
                if (
                    row.kind == name
                    and over <= set(row.axes)
                    and row.wire_bytes > least
                ):
                    yield f"{text}: {row}"
        elif name == "any" or name in RULES:
            for finding in self.all_findings if size else self.findings:
                same = name in ("any", finding.rule) and over <= set(finding.axes)
                if same and (not size or finding.size > least):
                    yield f"{text}: {finding}"
        else:
            known = (*RULES, *cost.KINDS, "any")
            raise MeshparError(f"{name!r}: {nearest(name, known)}")

    def diff(self, other: "Report") -> str:
        """Differences from another report, such as one of before a change."""
        return "\n".join(_differences(other, self)) or "no difference"

    def html(self, path: str) -> None:
        """Writes the report as a page, one file that asks for no other."""
        html_page.write(path, "A step, checked", _page(self))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        facts = self.facts
        yield self.summary
        for finding in self.findings:
            yield str(finding)
        if self.equality is not None:
            yield str(self.equality)
        if shown := rows(facts.moves):
            yield "collectives (bytes that one device sends per step)"
            yield from _table([row.cells for row in shown[:_MOST]])
            if len(shown) > _MOST:
                rest = sum(row.wire_bytes for row in shown[_MOST:])
                yield f"  {len(shown) - _MOST} more rows, {readable_bytes(rest)}"
        yield f"memory at the peak, {readable_bytes(self.memory.bytes)} by the schedule"
        yield from _table(
            [
                (readable_bytes(t.bytes), t.name, t.path, t.line)
                for t in self.memory.tensors[:_MOST]
            ]
        )

    @property
    def summary(self) -> str:
        """The first line: findings, devices, traffic and memory."""
        facts, found = self.facts, len(self.findings)
        sizes = ", ".join(f"{axis}={size}" for axis, size in facts.mesh.items())
        hidden = facts.wire_bytes - self.exposed_bytes
        beside = f", {readable_bytes(hidden)} of it beside compute" if hidden else ""
        return (
            f"{found or 'no'} finding{'s' * (found != 1)} on {facts.num_devices} "
            f"{facts.platform.name} devices ({sizes}): a device sends "
            f"{readable_bytes(facts.wire_bytes)} per step{beside}, and holds "
            f"{readable_bytes(facts.memory_bytes)}"
        )


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of text whose columns are aligned, without those that are empty."""
    columns = [column for column in zip(*rows, strict=True) if any(column)]
    widths = [max(map(len, column)) for column in columns]
    for row in zip(*columns, strict=True):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()


def _differences(before: Report, after: Report) -> Iterator[str]:
    """One line for each thing that is other after a change."""
    sizes = [
        ("sends per step", before.facts.wire_bytes, after.facts.wire_bytes),
        ("exposed", before.exposed_bytes, after.exposed_bytes),
        ("memory", before.facts.memory_bytes, after.facts.memory_bytes),
    ]
    for name, old, new in sizes:
        if old != new:
            yield f"{name}: {readable_bytes(old)} -> {readable_bytes(new)}"
    for sign, one, other in (("-", before, after), ("+", after, before)):
        known = {(x.rule, x.what) for x in other.findings}
        for finding in one.findings:
            if (finding.rule, finding.what) not in known:
                yield f"{sign} {finding}"
    old, new = (by_key(rows(report.facts.moves)) for report in (before, after))
    for key in sorted(old.keys() | new.keys()):
        (runs, size), (new_runs, new_size) = old.get(key, (0, 0)), new.get(key, (0, 0))
        if (runs, size) != (new_runs, new_size):
            kind, axes, phase, place = key
            yield (
                f"{kind} over {'*'.join(axes)}, {phase}, {place}: {runs} x -> "
                f"{new_runs} x, {readable_bytes(size)} -> {readable_bytes(new_size)}"
            )


def _page(report: Report) -> str:
    """The body of the report's page."""
    found = [
        (x.rule, x.what, float(x.size), "*".join(x.axes), x.path, x.line, x.remedy)
        for x in report.findings
    ]
    moved = [
        (float(row.wire_bytes), float(row.exposed_bytes), row.runs, row.kind)
        + ("*".join(row.axes), row.phase, row.path, row.line)
        for row in rows(report.facts.moves)
    ]
    held = [(float(t.bytes), t.name, t.path, t.line) for t in report.memory.tensors]
    tensors = "bytes", "array", "scopes", "line"
    columns = "rule", "finding", "bytes", "axes", "scopes", "line", "write instead"
    traffic = "sent", "exposed", "runs", "kind", "axes", "pass", "scopes", "line"
    equal = html.escape(str(report.equality or ""))
    return (
        f"<p>{html.escape(report.summary)}</p><p>{equal}</p>"
        f"<h2>Findings</h2>{html_page.table(columns, found)}"
        f"<h2>Collectives</h2>{html_page.table(traffic, moved)}"
        "<h2>Memory at the peak</h2>"
        f"{html_page.table(tensors, held[:100])}"
    )
