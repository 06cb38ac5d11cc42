"""The report of a check: findings first, then collectives and memory."""

import dataclasses
from collections.abc import Iterator

from meshpar.checker.facts import Facts, Move
from meshpar.checker.finding import CALL, TRAFFIC, Finding
from meshpar.units import readable_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """What a check found.

    Attributes:
      facts: of the compiled step.
      all_findings: also those below the threshold.
      threshold: a share of the bytes of traffic or memory, below 1; else bytes.
    """

    facts: Facts
    all_findings: tuple[Finding, ...]
    threshold: float = 0.01

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
    def moves(self) -> tuple[Move, ...]:
        """The collectives of the step."""
        return self.facts.moves

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        facts, found = self.facts, self.findings
        sizes = ", ".join(f"{axis}={size}" for axis, size in facts.mesh.items())
        yield (
            f"{len(found) or 'no'} finding{'s' * (len(found) != 1)}; "
            f"{facts.platform.name} ({sizes}); a device sends "
            f"{readable_bytes(facts.wire_bytes)} per step and holds "
            f"{readable_bytes(facts.memory_bytes)}"
        )
        for finding in found:
            yield str(finding)
        if self.moves:
            yield "collectives"
        for m in sorted(self.moves, key=lambda m: -m.wire_bytes):
            c = m.collective
            yield (
                f"  {c.kind} over {'*'.join(c.axes)}: {c.executions} x "
                f"{readable_bytes(c.payload_bytes)}, sends "
                f"{readable_bytes(m.wire_bytes)}, {m.phase} {m.path} {m.line}"
            )
