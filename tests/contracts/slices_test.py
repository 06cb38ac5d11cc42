"""Contracts of programs over several slices."""

import dataclasses

import pytest

from meshpar.contracts import Collective, Contract, DeclaredCollective

TERMS = (
    DeclaredCollective("all_reduce", ("data",), 2, 4, 8_000_000, "split gradients"),
    DeclaredCollective("all_reduce", ("data", "fsdp"), 8, 1, 800_000, "whole ones"),
)


def all_reduce(axes, size, payload, between_slices=False):
    found = Collective("all_reduce", axes, size, payload, 1, False, False, "", "")
    return dataclasses.replace(found, between_slices=between_slices)


BIG = all_reduce(("data",), 2, 10_500_000, between_slices=True)  # Padded.
SMALL = all_reduce(("data",), 2, 220_000, between_slices=True)  # Each device a part.
GATHER = dataclasses.replace(all_reduce(("fsdp",), 4, 2_000_000), kind="all_gather")
INSIDE = all_reduce(("fsdp",), 4, 800_000)


def test_slices_exchange_parts_with_padding():
    assert Contract(TERMS).violations([BIG, SMALL, INSIDE]) == []


@pytest.mark.parametrize(
    "collectives, said",
    [
        ([SMALL, INSIDE], "all_reduce between slices: 220000 bytes found, at least"),
        ([BIG, BIG, SMALL, INSIDE], "all_reduce over data: 21220000 bytes found"),
        ([BIG, SMALL, all_reduce(("fsdp",), 4, 2_000_000)], "all_reduce over fsdp"),
        ([BIG, SMALL, INSIDE, GATHER], "all_gather over fsdp: 2000000 bytes found"),
    ],
)
def test_less_and_much_more_are_violations(collectives, said):
    (line,) = Contract(TERMS).violations(collectives)
    assert line.startswith(said)


def test_without_slices_bytes_are_exact():
    exact = (
        all_reduce(("data",), 2, 8_000_000),
        all_reduce(("data", "fsdp"), 8, 800_000),
    )
    assert Contract(TERMS).violations(exact) == []
    more = all_reduce(("data",), 2, 8_000_004)
    assert len(Contract(TERMS).violations([more, exact[1]])) == 1
