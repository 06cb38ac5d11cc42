"""Figures of islands, clients and readers: claims that are quickly computed."""

import pytest
from support.figures import failed

from experiments.gallery import (
    bosen,
    data_servers,
    delay_compensation,
    push_sum,
)


@pytest.mark.parametrize(
    "claims",
    [
        delay_compensation.recurrence_claims,
        lambda: [bosen.order_claim()],
        lambda: push_sum.rate_claims(push_sum.curves_of((8,))),
    ],
    ids=["late pushes", "budgets", "push-sum"],
)
def test_claims_that_take_no_time_hold(claims):
    assert failed(claims()) == []


def test_shards_of_readers_that_change_lose_rows():
    plan = [data_servers.Turn(2, 0, 15), data_servers.Turn(3, 15, 40)]
    alone = [data_servers.Turn(2, 0, 40)]
    assert data_servers.read_once(data_servers.shards(alone, 0)) == 1.0
    assert data_servers.read_once(data_servers.shards(plan, 0)) < 0.7
