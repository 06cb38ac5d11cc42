"""A contract that is wrong fails; one that is kept does not."""

import dataclasses
import functools

import jax
import pytest
from support.tiny_models import lower, model

from meshpar.contracts.collective import Collective
from meshpar.contracts.contract import Contract, DeclaredCollective


@functools.cache
def program():
    return lower("data=2,fsdp=4", model(), clip_norm=1.0)


def wrong(change):
    """The contract with every exact term changed, one at a time."""
    terms = program().contract.terms
    for i, term in enumerate(terms):
        if not term.bound:
            yield term, Contract((*terms[:i], *change(term), *terms[i + 1 :]))


@pytest.mark.parametrize(
    "change",
    [
        lambda term: (),
        lambda term: (dataclasses.replace(term, axes=("tensor",)),),
        lambda term: (
            dataclasses.replace(term, payload_bytes=term.payload_bytes // 2),
        ),
        lambda term: (dataclasses.replace(term, kind="all_to_all"),),
    ],
    ids=["missing", "another axis", "half the bytes", "another kind"],
)
def test_every_wrong_contract_fails(change):
    assert program().violations() == []
    kinds = set()
    for term, contract in wrong(change):
        if term.payload_bytes < 64:
            continue  # The bound for scalars covers the metrics too.
        assert contract.violations(program().collectives), term
        kinds.add(term.kind)
    assert kinds == {"all_gather", "reduce_scatter", "all_reduce"}


def test_reductions_that_are_declared_have_to_be_found():
    twice = [
        contract
        for term, contract in wrong(
            lambda term: (
                dataclasses.replace(term, payload_bytes=3 * term.payload_bytes),
            )
        )
        if term.kind == "reduce_scatter"
    ]
    for contract in twice:
        (line,) = contract.violations(program().collectives)
        assert "reduce_scatter over fsdp" in line and "declared" in line


def found(kind="all_reduce", axes=("fsdp",), payload=100, executions=1):
    return Collective(
        kind, axes, 4, payload, executions, False, False, "main", "a.py:1"
    )


def test_unlisted_collectives_are_named_with_their_place():
    (line,) = Contract(()).violations([found("all_to_all", ("tensor",))])
    assert line == "all_to_all over tensor: 100 bytes found, none declared, at a.py:1"
    (line,) = Contract(()).violations([found(axes=())])
    assert "no mesh axes" in line


def test_bounds_take_what_fits_and_no_more():
    bound = DeclaredCollective(
        "any", ("fsdp", "tensor"), 8, 0, 200, "activations", bound=True
    )
    gather = found("all_gather", payload=200)  # 150 bytes on the wire.
    assert Contract((bound,)).violations([gather]) == []
    assert Contract((bound,)).violations([gather, found("permute", payload=100)])
    assert Contract((bound,)).violations([found("all_gather", ("data",))])


def test_more_executions_than_declared_are_a_violation():
    term = DeclaredCollective("all_reduce", ("fsdp",), 4, 2, 100, "gradients")
    assert Contract((term,)).violations([found(payload=50, executions=2)]) == []
    (line,) = Contract((term,)).violations([found(payload=25, executions=4)])
    assert "runs 4 times, declared 2" in line


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
def test_a_small_collective_may_be_spelled_as_an_all_reduce(kind):
    contract = Contract((DeclaredCollective(kind, ("fsdp",), 4, 2, 100, "gradients"),))
    rest = found(kind, payload=60)
    assert contract.violations([rest, found(payload=40)]) == []
    assert contract.violations([rest, found(payload=41)])
    assert contract.violations([rest, found(payload=39)])
    large = Contract((DeclaredCollective(kind, ("fsdp",), 4, 2, 2**22, "gradients"),))
    assert large.violations([found(kind, payload=2**21), found(payload=2**21)])


def test_state_is_held_to_its_last_byte():
    one = program()
    kept = one.state_bytes(one.compiled)
    assert one.violations() == [] and kept == dict(one.contract.state_bytes)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(one.init()))
    assert sum(kept.values()) == held - 8  # Step and seed.
    whole = kept | {"optimizer": 4 * kept["optimizer"]}
    (line,) = one.contract.state_violations(whole)
    assert line.startswith("optimizer: ") and f"{kept['optimizer']} declared" in line
