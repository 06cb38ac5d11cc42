"""The rules: each is a function from the facts of a step to findings."""

import dataclasses
from collections.abc import Callable, Iterable

from meshpar.checker import (
    activations,
    calls,
    loops,
    movement,
    placement,
    precision,
)
from meshpar.checker.facts import Facts
from meshpar.checker.finding import Finding

Rule = Callable[[Facts], Iterable[Finding]]

RULES: dict[str, tuple[Rule, ...]] = {
    "replicated": (placement.replicated, activations.replicated_activations),
    "idle_axis": (placement.idle_axis,),
    "same_matmul": (activations.same_matmul,),
    "reshard": (movement.reshard, movement.gathered_and_sliced),
    "fighting_constraints": (activations.fighting_constraints,),
    "gathered_twice": (movement.gathered_twice,),
    "needless_all_reduce": (movement.needless_all_reduce,),
    "sliced_all_reduce": (movement.sliced_all_reduce,),
    "constant_in_loop": (loops.constant_in_loop,),
    "reduced_in_every_round": (loops.reduced_in_every_round,),
    "small_collectives": (movement.small_collectives,),
    "float32_wire": (precision.float32_wire,),
    "donation": (placement.donation,),
    "host_transfer": (calls.host_transfers,),
    "recompilation": (calls.recompilation,),
}
"""{name: its functions}; a new rule is one function, and its entry here."""


def findings_of(facts: Facts) -> tuple[Finding, ...]:
    """Findings of all rules, the largest first; once for each rule and line."""
    found: dict[tuple, list[Finding]] = {}
    for name, functions in RULES.items():
        for finding in (x for function in functions for x in function(facts)):
            named = "" if finding.line else finding.what
            key = name, finding.line, finding.of, finding.axes, named
            finding = dataclasses.replace(finding, rule=name)
            found.setdefault(key, []).append(finding)
    merged = map(_merged, found.values())
    return tuple(sorted(merged, key=lambda finding: -finding.size))


def _merged(findings: list[Finding]) -> Finding:
    """The largest of the findings of one line, with the bytes of all."""
    largest = max(findings, key=lambda finding: finding.size)
    if len(findings) == 1:
        return largest
    return dataclasses.replace(
        largest,
        what=f"{largest.what}; and {len(findings) - 1} more at this line",
        size=sum(finding.size for finding in findings),
    )
