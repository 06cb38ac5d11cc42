"""Figures of islands, clients and readers: their quick versions are accepted."""

import matplotlib.figure
import pytest

from experiments.gallery import (
    bosen,
    catalog,
    data_servers,
    delay_compensation,
    push_sum,
)
from experiments.gallery.paper import Setting

NAMES = ("federated", "delay_compensation", "bosen", "data_servers", "push_sum")


def failed(claims):
    return [claim.text for claim in claims if not claim.holds]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_quick_versions_are_accepted(name):
    setting = Setting(quick=True, seeds=(0,), progress=lambda text, share: None)
    result = catalog.get(name).run(setting)
    assert failed(result.claims) == []
    result.draw(matplotlib.figure.Figure())
    assert all(len(row) == len(result.columns) for row in result.rows)


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
