"""How much of what a program moves is declared exactly, and what is held to nothing."""

import math

import pytest
from support.marks import slow
from support.tiny_models import lower, model

from meshpar.contracts import Collective, Contract, DeclaredCollective
from meshpar.contracts.shares import Shares


def collective(kind, axes, payload, runs=1):
    return Collective(kind, axes, 2, payload, runs, False, False, "main", "a.py:1")


def term(kind, axes, payload, why="weights", **more):
    return DeclaredCollective(kind, axes, 2, 1, payload, why, **more)


def shares(terms, *collectives):
    return Shares.of(Contract(tuple(terms)), collectives)


def test_what_is_declared_exactly():
    found = shares(
        [term("permute", ("pipe",), 100)], collective("permute", ("pipe",), 100)
    )
    assert (found.exact, found.total, found.exactly) == (100, 100, "100%")
    assert str(found) == (
        "100% of the bytes that the compiled program moves were declared exactly; "
        "nothing more is moved"
    )


def test_bounds_over_few_axes_come_before_those_that_hold_nothing():
    terms = [
        term("permute", ("pipe",), 999),
        term("any", ("pipe", "tensor"), math.inf, "the compiler chooses", bound=True),
        term("any", ("tensor",), 6, "activations", bound=True),
    ]
    found = shares(
        terms,
        collective("permute", ("pipe",), 990),
        collective("permute", ("tensor",), 10),
    )
    assert (found.exact, found.bounded, found.free) == (990, 6, 4)
    assert str(found).endswith(
        "0.6% is held to a bound; 0.4% is held to nothing (pipe*tensor, the compiler "
        "chooses)"
    )


def test_what_no_bound_holds_is_not_declared():
    bound = term("any", ("tensor",), 5, bound=True)
    found = shares([bound], collective("permute", ("tensor",), 2000))
    assert (found.bounded, found.undeclared) == (5, 1995)
    assert "0.2% is held to a bound; 99.7% is not declared" in str(found)


def test_shares_are_never_rounded_up():
    terms = [
        term("permute", ("pipe",), 9_999_999),
        term("any", ("pipe",), 1, bound=True),
    ]
    found = shares(terms, collective("permute", ("pipe",), 10_000_000))
    assert found.exactly == "99.9%"
    assert "less than 0.1% is held to a bound" in str(found)


def test_small_gathers_that_are_written_as_all_reduces_are_known():
    gather = term("all_gather", ("fsdp",), 100)
    found = shares([gather], collective("all_reduce", ("fsdp",), 100))
    assert (found.exact, found.undeclared) == (100, 0)


def test_a_program_that_moves_nothing():
    assert str(shares([])) == "the compiled program moves nothing between devices"


@pytest.mark.parametrize(
    "layout, least",
    [("fsdp=8", 0.999), slow("fsdp=2,tensor=2", 0.99), slow("pipe=2,data=4", 0.99)],
)
def test_programs_by_hand_are_declared_exactly(layout, least):
    found = Shares.of(*lower(layout).busiest)
    assert found.exact / found.total >= least
    assert found.free == found.undeclared == 0


@pytest.mark.slow
def test_nothing_holds_what_a_compiler_chooses():
    found = Shares.of(*lower("fsdp=2,tensor=2", lowering="jit").busiest)
    assert found.exact == 0 < found.free
    assert "is held to nothing (fsdp*tensor, lowering=jit: the" in str(found)


@pytest.mark.parametrize(
    "layout",
    [
        slow("tensor=2"),
        "data=2,tensor=2",
        slow("pipe=2,data=2,tensor=2,microbatches=4"),
    ],
)
def test_tokens_of_experts_over_tensor_are_declared_exactly(layout):
    """And no bound on what a compiler adds covers them."""
    program = lower(layout, model(num_experts=8, experts_per_token=2))
    assert program.violations() == []
    terms = [t for t in program.contract.terms if t.axes == ("tensor",)]
    found = [c for c in program.collectives if c.axes == ("tensor",)]
    for kind in ("all_gather", "reduce_scatter"):
        exact = sum(t.wire_bytes for t in terms if t.kind == kind and not t.bound)
        # On CPUs XLA gathers the scores of which it takes the largest.
        moved = [c for c in found if c.kind == kind and "router.py" not in c.source]
        moved_bytes = sum(c.wire_bytes for c in moved)
        # What gradients of weights gather again XLA may merge with the first gather.
        again = [t for t in terms if t.kind == kind and "gradients of weights" in t.why]
        assert 0 < exact - sum(t.wire_bytes for t in again) <= moved_bytes <= exact
    assert Shares.of(*program.busiest).exact > 0.9 * Shares.of(*program.busiest).total
