"""The rules: each is a function from the facts of a step to findings."""

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

RULES: tuple[Rule, ...] = (
    placement.replicated,
    placement.idle_axis,
    placement.donation,
    movement.reshard,
    movement.gathered_and_sliced,
    movement.sliced_all_reduce,
    movement.gathered_twice,
    movement.needless_all_reduce,
    movement.small_collectives,
    loops.constant_in_loop,
    loops.reduced_in_every_round,
    precision.float32_wire,
    activations.replicated_activations,
    activations.fighting_constraints,
    activations.same_matmul,
    calls.host_transfers,
    calls.recompilation,
)
"""All rules; a new one is one function, and one entry here."""


def findings_of(facts: Facts) -> tuple[Finding, ...]:
    """What all rules find, the largest first."""
    found = [finding for rule in RULES for finding in rule(facts)]
    return tuple(sorted(found, key=lambda finding: -finding.size))
