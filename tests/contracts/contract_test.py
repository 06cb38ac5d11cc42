"""A program keeps its contract, and violates every contract that differs."""

import dataclasses
import functools

import jax
import pytest
from support.marks import slow
from support.tiny_models import lower, model

from meshpar.contracts import Collective, Contract, DeclaredCollective


@functools.cache
def program():
    return lower("data=2,fsdp=4", model(), clip_norm=1.0)


def changed(change):
    """(term, contract with that term changed) for every exact term."""
    terms = program().contract.terms
    for i, term in enumerate(terms):
        if not term.bound:
            yield term, Contract((*terms[:i], *change(term), *terms[i + 1 :]))


@pytest.mark.parametrize(
    "change",
    [
        slow(lambda term: ()),
        lambda term: (dataclasses.replace(term, axes=("tensor",)),),
        lambda term: (
            dataclasses.replace(term, payload_bytes=term.payload_bytes // 2),
        ),
        lambda term: (dataclasses.replace(term, kind="all_to_all"),),
    ],
    ids=["missing", "another axis", "half the bytes", "another kind"],
)
def test_every_changed_term_is_a_violation(change):
    assert program().violations() == []
    kinds = set()
    for term, contract in changed(change):
        if term.payload_bytes < 64:
            continue  # The bound for scalars covers the metrics too.
        assert contract.violations(program().collectives), term
        kinds.add(term.kind)
    assert kinds == {"all_gather", "reduce_scatter", "all_reduce"}


def test_declared_reductions_must_be_found_in_full():
    contracts = [
        contract
        for term, contract in changed(
            lambda term: (
                dataclasses.replace(term, payload_bytes=3 * term.payload_bytes),
            )
        )
        if term.kind == "reduce_scatter"
    ]
    for contract in contracts:
        (line,) = contract.violations(program().collectives)
        assert "reduce_scatter over fsdp" in line and "declared" in line


def collective(kind="all_reduce", axes=("fsdp",), payload=100, executions=1):
    return Collective(
        kind, axes, 4, payload, executions, False, False, "main", "a.py:1"
    )


def test_undeclared_collectives_are_named_with_their_source_line():
    (line,) = Contract(()).violations([collective("all_to_all", ("tensor",))])
    assert line == "all_to_all over tensor: 100 bytes found, none declared, at a.py:1"


def test_bounds_cover_their_bytes_and_no_more():
    bound = DeclaredCollective(
        "any", ("fsdp", "tensor"), 8, 0, 200, "activations", bound=True
    )
    gather = collective("all_gather", payload=200)  # 150 bytes on the wire.
    assert Contract((bound,)).violations([gather]) == []
    assert Contract((bound,)).violations([gather, collective("permute", payload=100)])
    assert Contract((bound,)).violations([collective("all_gather", ("data",))])


def test_bounds_are_taken_together_those_over_few_axes_first():
    wide, narrow = (
        DeclaredCollective("any", axes, 8, 0, 100, "activations", bound=True)
        for axes in (("fsdp", "tensor"), ("fsdp",))
    )
    gather = collective("all_gather", payload=200)  # Sends 150 bytes over fsdp.
    for terms in ((wide, narrow), (narrow, wide)):
        assert Contract(terms).violations([gather]) == []
        both = collective("permute", ("fsdp", "tensor"), payload=50)
        assert Contract(terms).violations([gather, both]) == []
        more = collective("permute", ("fsdp", "tensor"), payload=51)
        assert Contract(terms).violations([gather, more])


def test_a_collective_over_a_part_of_an_axis_is_none_over_the_axis():
    term = DeclaredCollective("all_reduce", ("fsdp",), 4, 1, 100, "gradients")
    part = dataclasses.replace(collective(), partial=True, group_size=2)
    missing, extra = Contract((term,)).violations([part])
    assert missing == "all_reduce over fsdp: 0 bytes found, 100 declared (gradients)"
    assert extra.startswith("all_reduce over part of fsdp: 100 bytes found, none decl")
    room = DeclaredCollective("any", ("fsdp",), 4, 0, 100, "activations", bound=True)
    assert Contract((term, room)).violations([collective(), part]) == []
    tight = dataclasses.replace(room, payload_bytes=99)
    assert Contract((term, tight)).violations([collective(), part])


def test_more_executions_than_declared_are_a_violation():
    term = DeclaredCollective("all_reduce", ("fsdp",), 4, 2, 100, "gradients")
    assert Contract((term,)).violations([collective(payload=50, executions=2)]) == []
    (line,) = Contract((term,)).violations([collective(payload=25, executions=4)])
    assert "runs 4 times, declared 2" in line


def test_what_compilers_run_again_for_lack_of_memory_is_named():
    term = DeclaredCollective("all_gather", ("fsdp",), 4, 2, 200, "weights")
    once = collective("all_gather", executions=2)
    again = dataclasses.replace(once, name="all-gather.7.remat2", executions=1)
    (line,) = Contract((term,)).violations([once, again])
    assert "300 bytes found, 200 declared" in line
    assert "runs 1 of them again, because the device has too little memory" in line
    (line,) = Contract((term,)).violations([once, once])
    assert "too little memory" not in line


def test_runs_beyond_those_declared_are_taken_from_a_bound():
    term = DeclaredCollective("all_gather", ("fsdp",), 4, 2, 200, "x", gathers=True)
    found = [collective("all_gather", payload=50, executions=2)]
    found.append(collective("all_gather", payload=20))  # 15 bytes on the wire.
    bound = DeclaredCollective("any", ("fsdp",), 4, 0, 15, "activations", bound=True)
    assert Contract((term, bound)).violations(found) == []
    tight = dataclasses.replace(bound, payload_bytes=14)
    (line,) = Contract((term, tight)).violations(found)
    assert "runs 3 times, declared 2" in line


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
def test_a_small_collective_may_be_written_as_an_all_reduce(kind):
    contract = Contract((DeclaredCollective(kind, ("fsdp",), 4, 2, 100, "gradients"),))
    rest = collective(kind, payload=60)
    assert contract.violations([rest, collective(payload=40)]) == []
    assert contract.violations([rest, collective(payload=41)])
    assert contract.violations([rest, collective(payload=39)])
    large = Contract((DeclaredCollective(kind, ("fsdp",), 4, 2, 2**22, "gradients"),))
    assert large.violations(
        [collective(kind, payload=2**21), collective(payload=2**21)]
    )


def test_of_two_small_gathers_one_may_be_dropped_and_one_be_an_all_reduce():
    term = DeclaredCollective("all_gather", ("fsdp",), 4, 4, 200, "weights")
    contract = Contract((dataclasses.replace(term, gathers=True),))
    found = [collective("all_gather", payload=120), collective(payload=40)]
    assert contract.violations(found) == []
    assert Contract((term,)).violations(found)
    assert contract.violations([found[0], collective(payload=81)])
    assert contract.violations([found[0], collective(payload=10, executions=4)])


def test_state_bytes_are_exact():
    state_bytes = program().state_bytes(program().compiled)
    contract = program().contract
    assert program().violations() == [] and state_bytes == dict(contract.state_bytes)
    leaves = jax.tree.leaves(program().init())
    stored = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert sum(state_bytes.values()) == stored - 8  # Step and seed are not declared.
    replicated = state_bytes | {"optimizer": 4 * state_bytes["optimizer"]}
    (line,) = contract.state_violations(replicated)
    assert line.startswith("optimizer: ")
    assert f"{state_bytes['optimizer']} declared" in line
